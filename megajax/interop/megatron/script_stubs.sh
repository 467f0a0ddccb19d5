# Bash reads this file before a launch script. Programs become records of their words; see run_script.py.

((BASH_VERSINFO[0] >= 5)) || { echo "bash 5 or later is needed" >&2; exit 2; }
unset BASH_ENV
enable -n enable # loads code

command_not_found_handle() { megajax_record "$@"; }

exec() {
    (($#)) || return 0 # only redirections
    megajax_record "$@"
    exit
}

# What scripts ask of programs about paths and here-documents.
dirname() {
    local path=${1%/}
    [[ $path == */* ]] || path=./
    path=${path%/*}
    printf '%s\n' "${path:-/}"
}
basename() {
    local path=${1%/}
    path=${path##*/}
    printf '%s\n' "${path%"${2-}"}"
}
realpath() { [[ ${!#} == /* ]] && printf '%s\n' "${!#}" || printf '%s\n' "$PWD/${!#}"; }
readlink() { realpath "$@"; }
cat() {
    local text=
    if [[ ${1--} == - ]]; then IFS= read -r -d '' text || :; else text=$(<"$1"); fi
    printf '%s\n' "$text"
}

# The words of a program. Those of a shell, or of sbatch, are another script.
megajax_record() {
    local words=("$@") shell= text=
    while (($#)); do
        case $1 in
            *.py) break ;;
            bash | sh | sbatch | */bash | */sh | */sbatch) shell=${1##*/} ;;
            --wrap=*) set -- --wrap "${1#--wrap=}" ;&
            --wrap) [[ $shell == sbatch ]] && { megajax_interpret "${2-}"; return; } ;;
            --*) ;;
            -*c) [[ $shell == *sh ]] && { megajax_interpret "${@:2}"; return; } ;;
            *) [[ -f $1 && ($shell || $1 == *.sh) ]] && { megajax_interpret '. "$BASH_ARGV0"' "$@"; return; } ;;
        esac
        shift
    done
    [[ ! $shell ]] || IFS= read -r -d '' text || :
    [[ ! $text ]] || { megajax_interpret "$text"; return; }
    printf '%s\0' "${words[@]}" >"$MEGAJAX_RECORDS/${EPOCHREALTIME//[!0-9]/}-$BASHPID-$RANDOM"
}

# A text, as a shell of its own would run it: with the exported variables only. More arguments: its $0, $1, ...
megajax_interpret() (
    trap - DEBUG
    set +eux +o pipefail
    unset IFS
    for megajax_name in $(compgen -v); do
        case $megajax_name in BASH* | EPOCH* | RANDOM | SECONDS | LINENO) continue ;; esac
        [[ ${!megajax_name@a} == *x* ]] || unset "$megajax_name"
    done 2>/dev/null
    BASH_ARGV0=${2-bash}
    megajax_text=$1
    shift $(($# > 1 ? 2 : 1))
    trap 'megajax_before "$@"' DEBUG
    eval "$megajax_text"
)

# Before each command. A program that is given by its path has no handler: make a function of that name. If a program's
# output goes to a file, whose folder may be missing, record it here and skip it; not if it starts a shell, as bash has
# no nested DEBUG traps. The name is expanded only if that has no effect.
megajax_before() {
    [[ ${FUNCNAME[1]-} != megajax_* && $BASH_COMMAND != *$'\n'* ]] || return 0
    local megajax_quoted='([^][:space:]"'\''`()<>|&;[]|"[^"`]*"|'\''[^'\'']*'\'')*' megajax_words=$BASH_COMMAND megajax_first
    while [[ $megajax_words =~ ^[A-Za-z_][A-Za-z0-9_]*=$megajax_quoted[[:space:]]+(.*)$ ]]; do
        megajax_words=${BASH_REMATCH[2]}
    done
    megajax_first=${megajax_words%%[[:space:]]*}
    local megajax_simple='^"?(\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*(\[@\])?\}|[A-Za-z0-9_./~+-])+"?$'
    [[ $megajax_first =~ $megajax_simple ]] || return 0
    eval "megajax_first=($megajax_first)"
    [[ ${megajax_first-} == */* || ! $(type -t -- "${megajax_first-}") =~ builtin|function|keyword ]] || return 0
    local megajax_shell='(^|[[:space:]/])(bash|sh|sbatch)([[:space:]]|$)|\.sh([[:space:]]|$)' megajax_all=$megajax_words
    local megajax_output='^(.*[^[:space:]])[[:space:]]+[0-9]*(>|>>|>\||&>|&>>|<>|>&)[[:space:]]?'$megajax_quoted'$'
    while [[ $megajax_words =~ $megajax_output ]]; do megajax_words=${BASH_REMATCH[1]}; done
    if [[ $megajax_words != "$megajax_all" && ! $megajax_words =~ $megajax_shell ]]; then
        eval "megajax_record $megajax_words"
        return 1
    fi
    [[ ! ${megajax_first-} =~ ^[A-Za-z0-9_.~+-]*/[A-Za-z0-9_./~+-]*$ ]] ||
        eval "function $megajax_first { command_not_found_handle '$megajax_first' \"\$@\"; }"
}

set -T
trap 'shopt -s extdebug; megajax_before "$@"' DEBUG
