"""Shell scripts are read and never run: unknown values carry the reason, and control flow is refused."""

import pytest

from megajax.config.errors import UserError
from megajax.tools.flags import UNKNOWN
from megajax.tools.megatron_args import find_training
from megajax.tools.shell import Command, read_script


def commands(text: str, *arguments: str, **defined: str) -> list[Command]:
    return read_script(text, arguments=arguments, defined=defined)


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
        ("N=$((2 * (3+1)))\nM=$((N/3))\nrun $N $M $(( -N % 5 ))", ["run", "8", "2", "2"]),
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
        ("A=b.c\nrun ${A%.c}", "line 2: the expansion ${A%.c} is not supported"),
        ("A=$(nproc)\nB=$A/x\nrun $B", "line 1: only a shell can run $(nproc)"),
        ("run $((A + 1))", "line 1: $((A + 1)) is not known"),
        ("run $((08 + 1))", "line 1: $((08 + 1)) is not known"),
    ],
)
def test_unknown_values_carry_the_reason_and_line(text: str, reason: str) -> None:
    unknown = [word for command in commands(text) for word in command.words if word.unknown]
    assert [word.unknown for word in unknown] == [(reason,)]
    assert all(UNKNOWN in word.text for word in unknown)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("A=1\nif [ $A = 1 ]; then\n  A=2\nfi", "line 2: if"),
        ("for i in 1 2; do B=$i; done", "line 1: for"),
        ("A=0\n[ -f file ] && A=1", "line 2: &&"),
        ("A=0\n[[ -f file ]]", "line 2: [["),
        ("cd x \\\n  || exit 1", "line 1: ||"),
        ("f() {\n  A=1\n}", "line 1: ("),
        ("function f {\n  A=1\n}", "line 1: function"),
        ("((A += 1))", "line 1: ("),
        ("A=0\nread -r A", "line 2: read"),
        ("let A=1", "line 1: let"),
        ("shift\nrun $1", "line 1: shift"),
        ("set -- 1", "line 1: set"),
        ("printf -v A 1", "line 1: printf"),
        ("eval 'A=1'", "line 1: eval"),
        ("cat <<EOF > job\npython train.py --a $(\nEOF", "line 1: <<"),
    ],
)
def test_control_flow_is_refused_with_its_line_and_a_remedy(text: str, word: str) -> None:
    with pytest.raises(UserError) as raised:
        commands(f"{text}\nrun")
    assert str(raised.value).startswith(f"{word} is not supported") and "bash -x" in str(raised.value)


def test_plain_commands_that_change_nothing_are_read() -> None:
    text = 'set -euo pipefail\nmkdir -p "$(dirname "$A")"\n. env.sh\nprintf "A %s" 1 > log\nA=0\nunset A\nrun ${A:-x}'
    *_, last = commands(text)
    assert [word.text for word in last.words] == ["run", "x"]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "A=(a b", "run ${A", "A=(a; b)"])
def test_unclosed_quotes_and_brackets(text: str) -> None:
    with pytest.raises(UserError, match="line 1"):
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
    with pytest.raises(UserError, match="several"):
        find_training(commands(f"{launch}\n{launch}"), "run.sh")
    with pytest.raises(UserError, match="line 3: --c belongs to no command"):
        find_training(commands("python pretrain_gpt.py --a \\\n # --b \\\n --c"), "run.sh")


@pytest.mark.parametrize("digits", [10, 26, 4000])
def test_a_long_number_in_a_sum_is_unknown(digits):
    (command,) = commands(f"python a.py $(({'1' * digits}x))")
    assert command.words[-1].unknown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 60, "script: refused: 25,165,808 bytes"),
        ("A=(a b c d)\n" + "A+=(${A[@]})\n" * 60, "refused: .* entries"),
        ('A="' + "$a" * 60, "unclosed"),
        ("A=a\ufdd0", "U.FDD0"),
    ],
)
def test_a_script_whose_values_grow_without_end_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        commands(text)
