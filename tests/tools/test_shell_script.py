"""Shell scripts are read, never run: what only a shell could tell is said to be unknown."""

import pytest

from megajax.config.errors import UserError
from megajax.tools.flags import UNKNOWN
from megajax.tools.shell import Command, find_training, read_script


def commands(text: str, *arguments: str, **defined: str) -> list[Command]:
    return read_script(text, arguments=arguments, defined=defined)


def words(text: str, *arguments: str, **defined: str) -> list[str]:
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
        ("N=$((2 * (3+1)))\nM=$((N/3))\nrun $N $M $(( -N % 5 ))", ["run", "8", "2", "2"]),
        ("run a > log 2>&1 b &> c", ["run", "a", "b"]),
        ("run a=b --c=d 'e'\"f\"g", ["run", "a=b", "--c=d", "efg"]),
        ("A=1 run b", ["run", "b"]),
        ("sh -c 'python x.py --a \"b c\"'", ["python", "x.py", "--a", "b c"]),
        ('C="python x.py --a"\neval "$C 1"', ["python", "x.py", "--a", "1"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_arguments_and_definitions() -> None:
    assert words('run $1 "${2}" ${3:-c}', "a", "b b") == ["run", "a", "b b", "c"]
    assert words('run "$@" x', "a", "b b") == ["run", "a", "b b", "x"]
    assert words("A=inside\nrun $A", A="outside") == ["run", "outside"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\nrun $A", "line 2: $A is not known"),
        ("run ${1}", "line 1: argument 1 of the script is not known"),
        ("run $(date)", "line 1: only a shell can run $(date)"),
        ("run `date`", "line 1: only a shell can run `date`"),
        ("A=b.c\nrun ${A%.c}", "line 2: ${A%.c} is more than this reads"),
        ("A=$(nproc)\nB=$A/x\nrun $B", "line 1: only a shell can run $(nproc)"),
        ("run $((A + 1))", "line 1: $((A + 1)) is not known"),
        ("declare A\nshift\nrun $1", "line 3: argument 1 of the script is not known (changed by shift in line 2)"),
    ],
)
def test_what_is_not_known_is_said_with_its_line(text: str, why: str) -> None:
    found = [word for command in commands(text, "given") for word in command.words if word.unknown]
    if "argument 1" in why and "shift" not in why:
        found = [word for command in commands(text) for word in command.words if word.unknown]
    assert [word.unknown for word in found] == [(why,)]
    assert all(UNKNOWN in word.text for word in found)


def test_what_depends_on_a_shell_is_not_known() -> None:
    text = 'A=1\nif [ "$X" = y ]; then\n  A=2\nfi\nfor i in 1 2; do B=$i; done\nC=3\nrun $A $B $C'
    *_, last = commands(text)
    assert [word.text for word in last.words][-1] == "3"
    assert [word.unknown for word in last.words if word.unknown] == [
        ("line 3: $A is set where only a shell knows if it comes by",),
        ("line 5: $B is set where only a shell knows if it comes by",),
    ]


@pytest.mark.parametrize(
    ("condition", "branch"),
    [
        ('[ "$V" = x ]', "first"),
        ("[[ $V == y ]]", "last"),
        ("[[ $V != y && $V == x ]]", None),
        ("[[ $V != y ]] && [ $V == x ]", "first"),
        ("[ $V = y ] || [ -n $V ]", "first"),
        ("[[ -z $EMPTY ]]", "first"),
        ("[ ! -z $V ]", "first"),
        ("test 3 -gt $((1 + 1))", "first"),
        ("[ -f file ]", None),
        ("[[ $V == x* ]]", None),
        ("[[ $V < z ]]", None),
        ("[ $UNKNOWN = x ]", None),
        ("[ $UNKNOWN = x ] && [ $V = y ]", "last"),
        ("grep -q x file", None),
        ("! [ $V = y ]", None),
    ],
)
def test_conditions_on_known_values_are_decided(condition: str, branch: str | None) -> None:
    text = f"V=x\nEMPTY=\nif {condition}; then\n  A=first\nelif [ $V = z ]; then\n  :\nelse\n  A=last\nfi\nrun $A"
    *_, last = commands(text)
    (word,) = last.words[1:]
    assert (word.text if not word.unknown else None) == branch


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("V=x\nA=0\n[ $V = y ] && A=1", "0"),
        ("V=x\nA=0\n[[ $V == x ]] && A=1", "1"),
        ("V=x\nA=0\n[ $V = x ] ||\n  A=1", "0"),
        ("V=x\nA=0\n[ $V = x ] && [ $V = y ] && A=1", "0"),
        ("V=x\n[ $V = x ] && A=1 || A=2", "1"),
        ("V=x\n[ $V = y ] && A=1 || A=2", "2"),
        ("V=x\nA=(0)\nif [ $V = x ]; then [ $V = y ] && A+=(1); fi", "0"),
        ("mkdir -p x && A=1", "1"),
        ("cd x || exit 1\nA=1", "1"),
        ("A=0\n[ -f file ] && A=1", None),
        ("A=0\n[ $UNKNOWN = x ] || A=1", None),
        ("A=0\ngrep -q x file && A=1", None),
        ("A=0\ncommand -v x || A=1", None),
        ("A=0\nfor A in 1 2; do", None),
        ("A=0\nread -r A", None),
        ("A=0\nlet A=1", None),
        ("A=0\n((A += 1))", None),
        ("A=0\n((A++))", None),
        ("A=0\nprintf -v A 1", None),
        ("A=0\neval 'A=1'", None),
        ('A=0\nprintf "A\\n"', "0"),
        ("f() {\n  A=1\n}\nA=$1", "given"),
        ("function f() {\n  A=1\n}\nA=$1", "given"),
        ("function f {\n  A=1\n}\nA=$1", "given"),
        ("set -euo pipefail\nset -o errexit +x\nA=$1", "given"),
        ("set -- 1\nA=$1", None),
    ],
)
def test_variables_are_what_a_shell_would_make_of_them_or_not_known(text: str, value: str | None) -> None:
    *_, last = commands(f"{text}\nrun $A", "given")
    word = last.words[-1]
    assert (word.text if not word.unknown else None) == value


@pytest.mark.parametrize("head", ["f() {", "f()\n{", "function f {", "function f() {"])
def test_arguments_of_a_function_are_not_the_scripts(head: str) -> None:
    found = commands(f"{head} run $1 $@\n}}\nf 3", "given")
    (command,) = (one for one in found if one.words[0].text == "run")
    line = command.line
    assert [word.unknown for word in command.words[1:]] == [
        (f"line {line}: argument 1 of a function is not known",),
        (f"line {line}: $@ is not known",),
    ]


def test_commands_of_a_branch_that_is_not_taken_do_not_count() -> None:
    text = "N=2\nif [ $N -eq 1 ]; then\n python a.py --x\nelse\n if [ $N -eq 2 ]; then\n  python b.py --x\n fi\nfi"
    assert [command.words[1].text for command in commands(text)] == ["b.py"]


def test_a_text_in_the_script_is_no_command() -> None:
    text = "cat <<EOF > job\npython train.py --a $(\nEOF\npython pretrain_gpt.py --b"
    assert [command.words[0].text for command in commands(text)] == ["cat", "python"]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "A=(a b", "run ${A", "A=(a; b)"])
def test_what_nothing_closes(text: str) -> None:
    with pytest.raises(UserError, match="line 1"):
        commands(text)


def test_the_command_that_trains() -> None:
    text = "python tools/preprocess_data.py --input x\nGPUS=8\n"
    launch = "torchrun --nproc_per_node=$GPUS --nnodes 2 src/pretrain_gpt.py --a 1 | tee log"
    found = find_training(commands(text + launch), "run.sh")
    assert (found.script, found.devices, [word.text for word in found.words]) == (
        "src/pretrain_gpt.py",
        16,
        ["--a", "1"],
    )
    with pytest.raises(UserError, match="no command"):
        find_training(commands("echo hello"), "run.sh")
    with pytest.raises(UserError, match="several"):
        find_training(commands(f"{launch}\n{launch}"), "run.sh")
    with pytest.raises(UserError, match="line 3: --c belongs to no command"):
        find_training(commands("python pretrain_gpt.py --a \\\n # --b \\\n --c"), "run.sh")
