# Bash reads this file before a launch script. Programs become records of their words; see run_script.py.
((BASH_VERSINFO[0] >= 5)) || { echo "bash 5 or later is needed" >&2; exit 2; }
unset BASH_ENV && enable -n enable # loads code
exec {BASH_XTRACEFD}>/dev/null {MEGAJAX_FOLDERS}>&"$MEGAJAX_FOLDERS"- # no trace of this file; a number above 9
command_not_found_handle() { megajax_record "$@"; }
exec() {
    (($#)) || return 0 # only redirections
    while [[ ${1-} == -* ]]; do [[ $1 != -*a ]] || shift; shift; done
    megajax_record "$@"; exit
}
# Questions and folders: all programs are there, and a missing folder has its name all the same.
type() { builtin type "$@" 2>/dev/null || :; }
hash() { builtin hash "$@" 2>/dev/null || :; }
command() {
    [[ ${1-} != -p ]] || shift
    [[ ${1-} != -[vV] ]] || { builtin command "$@" || printf '%s\n' "${@:2}"; return; }
    if [[ $(builtin type -at -- "${1-}") == *builtin* ]]; then builtin command "$@"; else megajax_record "$@"; fi
}
cd() {
    builtin cd "$@" 2>/dev/null && return
    echo "cd ${*:-}: no such folder here" >&2
    OLDPWD=$PWD PWD=$(realpath "$@")
}
pwd() { printf '%s\n' "$PWD"; }
pushd() { builtin pushd "$@" || builtin pushd .; }
mkdir() { # by the parent process, in the temporary folder alone
    local path REPLY tries=0
    for path; do
        [[ $path == /* ]] || path=$(builtin pwd)/$path
        [[ $path == "${MEGAJAX_RECORDS%/*}"/* && ${path##*/} != -* ]] || continue
        printf '%s\0' "$path" >&"$MEGAJAX_FOLDERS"
        until [[ -d $path ]] || ((tries++ == 100)); do read -rt 0.01 -u "$MEGAJAX_FOLDERS" || :; done
    done
    megajax_record mkdir "$@"
}
# What scripts ask of programs about paths and here-documents.
dirname() { set -- "${1%/}" && [[ $1 == */* ]] && set -- "${1%/*}" || set -- .; printf '%s\n' "${1:-/}"; }
basename() { set -- "${1%/}" "${2-}" && set -- "${1##*/}" "$2" && printf '%s\n' "${1%"$2"}"; }
readlink() { realpath "$@"; }
realpath() { [[ ${!#} == /* ]] && printf '%s\n' "${!#}" || printf '%s\n' "$PWD/${!#}"; }
cat() {
    local text && if [[ ${1--} == - ]]; then IFS= read -r -d '' text; else text=$(<"$1"); fi || :
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
        [[ $shell != sbatch ]] || local -x SLURM_JOB_ID=${SLURM_JOB_ID:-1} # it would submit itself
        shift
    done
    [[ ! $shell ]] || IFS= read -r -d '' text || [[ ! $text ]] || { megajax_interpret "$text"; return; }
    printf '%s\0' "${words[@]}" >"$MEGAJAX_RECORDS/${EPOCHREALTIME//[!0-9]/}-$BASHPID-$RANDOM"
}

# A text, as a shell of its own would run it: with the exported variables only. More arguments: its $0, $1, ...
megajax_interpret() (
    trap - DEBUG && set +eux +o pipefail && unset IFS
    for megajax_variable in $(compgen -v); do
        case $megajax_variable in BASH* | EPOCH* | RANDOM | SECONDS | LINENO | megajax_*) continue ;; esac
        [[ ${!megajax_variable@a} == *x* ]] || unset "$megajax_variable"
    done 2>/dev/null
    BASH_ARGV0=${2-bash} megajax_text=$1 && shift $(($# > 1 ? 2 : 1))
    trap '! megajax_skips "$@"' DEBUG
    eval "$megajax_text"
)

# Before each command: whether to skip it. Its name is expanded if that starts nothing. A program that bash finds has no
# handler: make a function of its name. If its output goes to a file, whose folder may be missing, or the name can't be
# a function's, record it here; a shell only if need be, as bash has no nested DEBUG traps.
megajax_skips() {
    [[ ${FUNCNAME[1]-} != megajax_record && $BASH_COMMAND != [[\(]* ]] || return
    local megajax_words=$BASH_COMMAND megajax_first megajax_kind megajax_all megajax_to megajax_lost=
    while [[ $megajax_words == *=* && $megajax_words =~ $megajax_assigned ]]; do megajax_words=${BASH_REMATCH[2]}; done
    [[ ! $megajax_words =~ ^[A-Za-z_][A-Za-z0-9_]*\+?= && $megajax_words =~ $megajax_name ]] || return
    eval "megajax_first=(${BASH_REMATCH[1]})"
    # Most commands are builtins without files: a subshell for each would be slow.
    [[ $PATH != /dev/null || ${megajax_first-} == source || ${megajax_first-} == *[!A-Za-z0-9_-]* ||
        ${megajax_words//[<>]&[0-9]/} == *[\<\>]* ]] || return
    megajax_kind=$(builtin type -t -- "${megajax_first-}") megajax_all=$megajax_words
    while [[ $megajax_words == *[\<\>]* && $megajax_words != *$'\n'* && $megajax_words =~ $megajax_file ]]; do
        megajax_words=${BASH_REMATCH[1]}
        [[ ${BASH_REMATCH[2]} != "<" && ${BASH_REMATCH[3]} != [0-9-] ]] || continue
        megajax_to=$(eval "printf %s ${BASH_REMATCH[3]}")
        [[ $megajax_to == /* ]] || megajax_to=$(builtin pwd)/$megajax_to
        [[ $megajax_to == /dev/* || $megajax_to == "${MEGAJAX_RECORDS%/*}"/* && -d ${megajax_to%/*} ]] || megajax_lost=1
    done
    if [[ $megajax_kind == builtin && $megajax_first =~ ^(source|\.)$ ]] &&
        ! (eval "set -- $megajax_words" && [[ -e ${2-/} ]]); then
        echo "$megajax_words: no such file here" >&2
    elif [[ $megajax_kind =~ builtin|function|keyword && ${megajax_first-} != */* ]]; then
        [[ $megajax_lost ]] && { eval "$megajax_words" >/dev/null || :; }
    elif [[ $megajax_words != "$megajax_all" || ${megajax_first-} == *[!A-Za-z0-9_./~+-]* ]] &&
        [[ $megajax_lost || ! $megajax_words =~ $megajax_shell ]]; then
        eval "megajax_record $megajax_words" || :
    else
        [[ $megajax_kind != file && ${megajax_first-} != */* ]] ||
            eval "function $megajax_first { command_not_found_handle '$megajax_first' \"\$@\"; }"
        return 1
    fi
}
# Expressions for bash's own text of a command.
megajax_plain='[^][:space:]"'\''`()<>|&;\[]|\\.|'\''[^'\'']*'\''|"[^"`(]*"|\$\{[^}`(]*\}'
megajax_value='('$megajax_plain'|"[^"`]*"|\$\([^()`]*\))*'
megajax_name='^(('$megajax_plain')+)([[:space:]]|$)'
megajax_assigned='^[A-Za-z_][A-Za-z0-9_]*\+?='$megajax_value'[[:space:]]+(.*)$'
megajax_file='^(.*[^[:space:]])[[:space:]]+[0-9]*(<|>|>>|>\||&>|&>>|<>|>&)[[:space:]]?('$megajax_value')$'
megajax_shell='(^|[[:space:]/])(bash|sh|sbatch)([[:space:]]|$)|\.sh([[:space:]]|$)'
set -T
trap 'shopt -s extdebug; ! megajax_skips "$@"' DEBUG # `!`: set -e passes over it
