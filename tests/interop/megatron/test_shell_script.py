"""Shell scripts are followed, never run: unknown conditions keep both branches, unknown values their reason."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megajax.config.errors import UserError
from megajax.interop.megatron.flags.reading import UNKNOWN
from megajax.interop.megatron.shell.interpreter import Script, read_script
from megajax.interop.megatron.shell.state import Command
from megajax.tools.megatron_args import find_training


def commands(text: str, *arguments: str, **defined: str) -> tuple[Command, ...]:
    return read_script(text, arguments=arguments, defined=defined).commands


def follow(text: str, *arguments: str, assume: dict[str, str] | None = None, **defined: str) -> Script:
    return read_script(text, arguments=arguments, defined=defined, answers=assume)


def texts(script: Script) -> list[str]:
    return [" ".join(word.text for word in command.words) for command in script.commands]


def expand(text: str, *arguments: str, **defined: str) -> list[str]:
    """The words of a script's only command."""
    (command,) = commands(text, *arguments, **defined)
    assert not any(word.unknown for word in command.words), [word.unknown for word in command.words]
    return [word.text for word in command.words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nrun $A ${A}2 \"$A 3\" '$A' \\$A", ["run", "1", "12", "1 3", "$A", "$A"]),
        ("A='x y'\nrun $A \"$A\" --o=$A", ["run", "x", "y", "x y", "--o=x", "y"]),
        ('A=(a "b c" # no\n  d)\nrun ${A[@]}', ["run", "a", "b", "c", "d"]),
        ('A=(a "b c"\n  d)\nrun "${A[@]}"', ["run", "a", "b c", "d"]),
        ("A=(a)\nA+=(b)\nB=(${A[@]} c)\nrun ${B[*]}", ["run", "a", "b", "c"]),
        ('O=" --a 1 \\\n  --b 2"\nO+=" --c"\nrun $O', ["run", "--a", "1", "--b", "2", "--c"]),
        ("run --a \\\n  --b # --c\n", ["run", "--a", "--b"]),
        ("export A=1 B=$A\nrun $A$B", ["run", "11"]),
        ("A=\nrun ${A:-x} ${A-y} $A", ["run", "x"]),
        ("D=7\nrun ${C:-a$D}", ["run", "a7"]),
        ("N=$((2 * (3+1)))\nM=$((N/3))\nrun $N $M $(( -N % 5 ))", ["run", "8", "2", "-3"]),
        ("run a > log 2>&1 b &> c", ["run", "a", "b"]),
        ("run a=b --c=d 'e'\"f\"g", ["run", "a=b", "--c=d", "efg"]),
        ("A=1 run b", ["run", "b"]),
        ("sh -c 'python x.py --a \"b c\"'", ["python", "x.py", "--a", "b c"]),
        ('C="python x.py --a"\neval "$C 1"', ["python", "x.py", "--a", "1"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert expand(text) == expected


def test_arguments_and_definitions() -> None:
    assert expand('run $1 "${2}" ${3:-c}', "a", "b b") == ["run", "a", "b b", "c"]
    assert expand('run "$@" x', "a", "b b") == ["run", "a", "b b", "x"]
    assert expand("A=inside\nrun $A", A="outside") == ["run", "outside"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\nrun $A", "line 2: $A is not known"),
        ("run ${1}", "line 1: argument 1 of the script is not known"),
        ("run $(date)", "line 1: only a shell can run $(date)"),
        ("run `date`", "line 1: only a shell can run `date`"),
        ("A=b.c\nrun ${A@Q}", "line 2: the expansion ${A@Q} is not supported"),
        ("A=B\nrun ${!A}", "line 2: the expansion ${!A} is not supported"),
        ("run $(seq 3)", "line 1: only a shell can run $(seq 3)"),
        ("A=$(nproc)\nB=$A/x\nrun $B", "line 1: only a shell can run $(nproc)"),
        ("run $((A + 1))", "line 1: $((A + 1)) is not known"),
        ("run $((08 + 1))", "line 1: $((08 + 1)) is not known"),
        ("A=010\nrun $((A + 1))", "line 2: $((A + 1)) is not known"),
        ("run $((1 < 2 ? 3 : 4))", "line 1: $((1 < 2 ? 3 : 4)) is not known"),
        ("run $((3 > 2 > 1))", "line 1: $((3 > 2 > 1)) is not known"),
        ("A=abc\nrun ${A/[a-b]/x}", "line 2: the expansion ${A/[a-b]/x} is not supported"),
        ("A=abc\nrun ${A:1}", "line 2: the expansion ${A:1} is not supported"),
    ],
)
def test_unknown_values_carry_the_reason_and_line(text: str, reason: str) -> None:
    unknown = [word for command in commands(text) for word in command.words if word.unknown]
    assert [word.unknown for word in unknown] == [(reason,)]
    assert all(UNKNOWN in word.text for word in unknown)


CONTROL = [
    ("A=1\nif [ $A = 1 ]; then\n  A=2\nfi\nrun $A", "run 2"),
    ("A=x\nif [[ $A == y ]]; then B=1; elif [[ $A == [x-z] ]]; then B=2; else B=3; fi\nrun $B", "run 2"),
    ("for i in 1 2 3; do B+=$i; done\nrun $B", "run 123"),
    ("for i in {1..4}; do [ $i = 3 ] && break; B+=$i; done\nrun $B", "run 12"),
    ("i=0\nwhile (( i < 5 )); do i=$((i + 1)); if ((i % 2)); then continue; fi; B+=$i; done\nrun $B", "run 24"),
    ("i=3\nwhile ! [ $i -eq 0 ]; do B+=$i; let i-=1; done\nrun $B", "run 321"),
    ("i=0\nB=0\nwhile (( i < 3 )); do C+=$((i++)); (( B += i )); done\nrun $i $B $C", "run 3 6 012"),
    ("case abc in\n  a|b) X=1 ;;\n  a*) X=2 ;;\n  *) X=3 ;;\nesac\nrun $X", "run 2"),
    ("f() {\n  local A=$1\n  B=$A\n}\nA=0\nf 7\nrun $A $B", "run 0 7"),
    ('function g { [ "$1" = x ] && return; B=1; }\nB=0\ng x\nrun $B', "run 0"),
    ('train() { run --a 1 "$@"; }\ntrain --b 2', "run --a 1 --b 2"),
    ('set -- a b c\nshift\nrun $# $1 "$@"', "run 2 b b c"),
    ("while [[ $# -gt 0 ]]; do case $1 in --a) A=$2; shift 2;; *) shift;; esac; done\nrun ${A-}", "run"),
    ("printf -v A '%s-%s' 1 2\neval B=$A\nrun $B", "run 1-2"),
    ('read -r A B <<< "1 2"\nrun $A $B', "run 1 2"),
    ('D=$(dirname /a/b/c.sh)\nrun $D $(basename "$D") `echo x`', "run /a/b b x"),
    (
        "F=a/model.tar.gz\nrun ${F%.gz} ${F%%.*} ${F##*/} ${F#*/} ${F/model/m} ${F//a/o}",
        "run a/model.tar a/model model.tar.gz model.tar.gz a/m.tar.gz o/model.tor.gz",
    ),
    ("A=b-c\ncase $A in [^a]*) A=${A//-/_} ;; esac\nrun $A", "run b_c"),
    ("A=abc\nB=(x y z)\nrun ${#A} ${#B[@]} ${B[1]} ${B[-1]}", "run 3 3 y z"),
    ("B=5\nrun ${C:+x} ${B:+y} ${C:=z} $C", "run y z z"),
    ("M=(a b)\nM[2]=c\nM[0]+=x\nM[-2]=y\nrun ${M[@]}", "run ax y c"),
    ("run $((7 / 2)) $((-7 / 2)) $((-7 % 2)) $((1 < 2 && (0 > 2 || 3))) $((0x10 + 1))", "run 3 -3 -1 1 17"),
    ("A=1\n{ A=2; B=3; }\n( A=9 )\nrun $A $B", "run 2 3"),
    ('[ -z "" ] && A=1 || A=2\nrun $A', "run 1"),
    ("! [ a = b ] && A=1\nrun $A", "run 1"),
    ("[[ a1 == [a-z][0-9] && ! ( a == b ) ]] && A=1\nrun $A", "run 1"),
    ("A=(a # it's\n  b)\nrun ${A[@]} $(echo c # it's\n)", "run a b c"),
    ("f() { if true; then local A=1; fi; }\nA=0\nf\nrun $A", "run 0"),
    ("read -ra A <<< 'a b'\nrun ${A[1]}", "run b"),
    ("A=1\nif [ -e / ]; then unset A; else unset A; fi\nrun ${A-none}", "run none"),
    ("[ a = a -a ! b = c ] && [ 1 -lt 2 -o x = y ] && A=1\nrun $A", "run 1"),
    ("run a 2>&1 | tee log", "run a"),
    ("bash <<EOF\nrun $((1 + 1)) \\${A-}\nEOF", "run 2"),
    ("set -- 1 2\nA=x\nbash <<EOF\nrun \"$A '$A' $@\"\nEOF", "run x 'x' 1 2"),
    ("sbatch --nodes=2 <<'EOF'\n#!/bin/bash\nA=4\nrun $A\nEOF", "run 4"),
    ("sbatch --wrap='python x.py --a 1'", "python x.py --a 1"),
    ("if true; then\n  run a; exit 0\nfi\nrun b", "run a"),
    ("while true; do run a; sleep 5; done", "run a"),
    ("A=$'x\\ty'\nrun \"$A\"", "run x\ty"),
    (': "${A:=5}"\nrun $A', "run 5"),
    ("export -n A=1\nreadonly B=2\nrun $A$B", "run 12"),
]


@pytest.mark.parametrize(("text", "expected"), CONTROL)
def test_control_flow_with_known_values(text: str, expected: str) -> None:
    assert " | ".join(texts(follow(text))) == expected


def test_bash_agrees_on_the_meaning_of_each_script(tmp_path: Path) -> None:
    """The expectations above are those of a shell, if one is installed."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash")
    quiet = 'run() { echo "run $*"; }; python() { echo "python $*"; }; sleep() { exit; }; sbatch() { bash; }; '
    quiet += "export -f run python; "
    known = [(text, expected) for text, expected in CONTROL if "--wrap" not in text]
    for text, expected in known:
        done = subprocess.run([bash, "-c", f"{quiet}\n{text}"], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout.strip() == expected, text


def test_an_unknown_condition_keeps_both_branches() -> None:
    text = "A=0\nB=1\nif [ -f no-such-file ]; then\n  A=1\nfi\nrun $A $B"
    (command,) = (script := follow(text)).commands
    reason = "line 3: [ -f no-such-file ] is not known and decides on $A (true: 1; false: 0): "
    assert [word.unknown for word in command.words] == [(), (f"{reason}--assume=3=true or --assume=3=false",), ()]
    assert not script.notes
    assert texts(follow(text, assume={"3": "true"})) == ["run 1 1"]
    assert texts(follow(text, assume={"3": "false"})) == ["run 0 1"]
    with pytest.raises(UserError, match=r"--assume=4"):
        follow(text, assume={"4": "true"})
    with pytest.raises(UserError, match=r"expected true or false"):
        follow(text, assume={"3": "yes"})


def test_branches_without_an_effect_need_no_answer() -> None:
    text = "if [ ! -d out ]; then echo new; mkdir out; fi\ncd x || exit 1\nif grep -q a b; then echo found; fi\nrun"
    assert texts(follow(text)) == ["run"]


def test_a_branch_that_ends_the_script_is_left_with_a_note() -> None:
    script = follow("if [ ! -f pretrain.txt ]; then\n  echo missing >&2\n  exit 1\nfi\nrun")
    assert texts(script) == ["run"]
    assert script.notes == (
        "line 1: [ ! -f pretrain.txt ] is taken not to be true, as the script ends there: --assume=1=true",
    )
    assert texts(follow("if [ -f x ]; then exit; fi\nrun", assume={"1": "true"})) == []


def test_unset_variables_count_as_empty_in_conditions_with_a_note() -> None:
    text = 'F=(--a)\nif [ -n "${KEY}" ]; then\n  F+=(--b ${NAME:-x})\nfi\nrun ${F[@]}'
    script = follow(text)
    assert texts(script) == ["run --a"]
    assert script.notes == ('line 2: $KEY is not set, so [ -n "${KEY}" ] is false; --define=KEY=VALUE changes it',)
    assert texts(follow(text, KEY="1")) == ["run --a --b x"]
    assert "argument 1 of the script is not set" in follow('if [ "$1" = -d ]; then D=1; fi\nrun').notes[0]


def test_commands_of_both_branches_are_read_with_a_note() -> None:
    script = follow("if [ -d x ]; then python a.py --x 1; else python a.py --x 2; fi")
    assert texts(script) == ["python a.py --x 1", "python a.py --x 2"]
    assert "decides on a command: --assume=1=true or --assume=1=false" in script.notes[0]


def test_a_case_of_an_unknown_word() -> None:
    text = "M=$(hostname)\ncase $M in\n  a*) N=1;;\n  b) N=2;;\nesac\nrun $N"
    (command,) = follow(text).commands
    assert "a*: 1; b: 2; …: not set" in command.words[1].unknown[0] and "--assume=2=b" in command.words[1].unknown[0]
    assert texts(follow(text, assume={"2": "b"})) == ["run 2"]


def test_a_loop_with_an_unknown_number_of_iterations() -> None:
    (command,) = follow("A=0\nwhile read -r LINE; do A=1; done < file\nrun $A").commands
    assert "decides on $A (true: 1; false: 0)" in command.words[1].unknown[0]
    (command,) = follow("for i in $(seq 3); do A+=x; done\nrun $A").commands
    assert "the list of for i is not known and decides on $A (true: x; false: not set)" in command.words[1].unknown[0]
    with pytest.raises(UserError, match=r"it is not known whether .* is true: --assume=1=true"):
        follow("for i in 1 2; do if [ -f x ]; then break; fi; A+=1; done\nrun $A")


def test_other_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.sh").write_text("LAYERS=$1\n[ $LAYERS = 4 ] || return\nHIDDEN=64\n")
    (tmp_path / "job.sh").write_text("#!/bin/bash\nrun $1 $LAYERS ${HIDDEN:-none}\n")
    text = 'source "$(dirname "$0")/conf/model.sh" 4\n. ./none.sh\nexport LAYERS\nsbatch -N 2 job.sh x\n./job.sh y'
    script = read_script(text, path="script.sh")
    assert texts(script) == ["run x 4 none", "run y 4 none"]
    assert any("conf/model.sh is read too" in note for note in script.notes)
    assert any("./none.sh is not read (there is no such file)" in note for note in script.notes)
    (tmp_path / "conf" / "model.sh").write_text("if [ -f x ]; then LAYERS=2; fi\n")
    with pytest.raises(UserError, match=r"model.sh, line 2: unclosed"):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "model.sh").write_text("A=1\nB='")
        read_script(". bad/model.sh")
    (command,) = read_script(". conf/model.sh\nrun $LAYERS").commands
    assert "line 1 of conf/model.sh" in command.words[1].unknown[0]
    assert "--assume=model.sh:1=true" in command.words[1].unknown[0]
    assert texts(read_script(". conf/model.sh\nrun $LAYERS", answers={"model.sh:1": "true"})) == ["run 2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if [ 1 = 1 ]; then\n  A=1\n", "line 3: expected elif or else or fi, got the end"),
        ("for i in 1 2\n  run", "line 2: expected do, got run"),
        ("A=1\nfi", "line 2: fi is not expected here"),
        ("case x in\n a) run", "line 1: case without esac|expected"),
        ("cat <<EOF\nx", "line 2: no line EOF ends the here-document"),
        ("A=1\nselect x in a b; do run; done", "line 2: select is not supported: write it otherwise"),
        ("\nwhile getopts n: o; do run; done", "line 2: getopts is not supported: write it otherwise"),
        ("A=1\n\ndeclare -A M", "line 3: declare -A is not supported"),
        ("M=([2]=1)", r"line 1: an array with indices, M, is not supported"),
        ("case a in\n  [[:alpha:]]) run ;;\nesac", r"line 1: the pattern \[\[:alpha:\]\] is not supported"),
        ("M[x]=1", r"line 1: the index of M\[x\] is not supported"),
        ("case a in\n  a) run ;&\n  b) run ;;\nesac", "line 2: ;& is not supported"),
        ("f() { f; }\nf", "more than 40 levels of functions and scripts"),
        ("i=0\nwhile true; do i=$((i + 1)); done", "refused: .* entries"),
        ("(" * 60 + ")" * 60, "more than 40 levels"),
        ("A=" + "${A:-" * 60 + "}" * 60, "more than 40 levels"),
        ("\nfor ((i = 0; i < N; i++)); do A=1; done", r"line 2: for \(\( \)\) is not supported"),
        ("until false; do A=1; done", "line 1: until is not supported"),
        ("A=1\n(( A + (B = 2) ))", r"line 2: an assignment inside of \(\( A"),
    ],
)
def test_files_that_are_no_complete_script(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        follow(text)


def test_plain_commands_without_an_effect_are_read() -> None:
    text = 'set -euo pipefail\nmkdir -p "$(dirname "$A")"\n. env.sh\nprintf "A %s" 1 > log\nA=0\nunset A\nrun ${A:-x}'
    *_, last = commands(text)
    assert [word.text for word in last.words] == ["run", "x"]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "A=(a b", "run ${A", "A=(a; b)"])
def test_unclosed_quotes_and_brackets(text: str) -> None:
    with pytest.raises(UserError, match=r"line 1"):
        commands(text)


def test_the_training_command() -> None:
    text = "python tools/preprocess_data.py --input x\nGPUS=8\n"
    launch = "torchrun --nproc_per_node=$GPUS --nnodes 2 src/pretrain_gpt.py --a 1 | tee log"
    training = find_training(commands(text + launch), "run.sh")
    assert (training.script, training.devices, [word.text for word in training.words]) == (
        "src/pretrain_gpt.py",
        16,
        ["--a", "1"],
    )
    with pytest.raises(UserError, match="no command"):
        find_training(commands("echo hello"), "run.sh")
    with pytest.raises(UserError, match=r"the commands that train are 1: .* Choose one"):
        find_training(commands(f"{launch}\n{launch}"), "run.sh")
    with pytest.raises(UserError, match=r"line 3: --c belongs to no command"):
        find_training(commands("python pretrain_gpt.py --a \\\n # --b \\\n --c"), "run.sh")


@pytest.mark.parametrize("digits", [10, 26, 4000])
def test_a_long_number_in_a_sum_is_unknown(digits):
    (command,) = commands(f"python a.py $(({'1' * digits}x))")
    assert command.words[-1].unknown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 60, "script: refused: .* bytes"),
        ("A=(a b c d)\n" + "A+=(${A[@]})\n" * 60, "refused: .* entries"),
        ('A="' + "$a" * 60, "unclosed"),
        ("A=a\U000f0000", "U.F0000"),
    ],
)
def test_a_script_whose_values_grow_without_end_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        commands(text)
