"""Launch scripts are run by bash without programs: the words of the programs are what the scripts would give them."""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.megatron import confined_bash, run_script
from megajax.interop.megatron.args import find_training, main

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    os.uname().machine not in confined_bash.REFUSED_CALLS or shutil.which("bash") is None,
    reason="no seccomp or no bash",
)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "working").mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(text: str, *arguments: str, **defined: str) -> run_script.ScriptRun:
    Path("script.sh").write_text(text)
    return run_script.run_script(Path("script.sh"), text.encode(), arguments, defined)


def texts(text: str, *arguments: str, **defined: str) -> list[str]:
    return [shlex.join(words) for words in run(text, *arguments, **defined).commands]


ARGUMENTS = {
    "bert_340m.sh": ["ckpt", "vocab", "corpus"],
    "gpt3_175b.sh": ["ckpt", "board", "vocab", "merges", "data"],
    "t5_220m.sh": ["ckpt", "board", "vocab", "corpus"],
    "vlm_2b.sh": ["ckpt", "board", "vocab", "merges"],
    "experts.sh": ["saved", "llama.model", "corpus"],
    "windows.sh": ["--saved", "saved"],
    "hybrid.sh": ["corpus", "tokenizer.model"],
}
TABLE = [shlex.split(line) for line in (HERE / "script_words.txt").read_text().splitlines()]
"""Script, devices or None, Python file and its words."""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_each_script_gives_its_words(row: list[str]) -> None:
    name, devices, program, *expected = row
    Path("pretrain_gpt.py").touch()
    Path("saved").mkdir()
    (path,) = HERE.rglob(name)
    defined = {"CLUSTER": "c", "TOKENS": "corpus"} if name == "job.sh" else {}
    actual = run_script.run_script(path, path.read_bytes(), ARGUMENTS.get(name, []), defined)
    training = find_training(actual.commands, name)
    assert (training.script, str(training.devices)) == (program, devices)
    assert list(training.words) == [word.replace("WORKING", str(Path.cwd())) for word in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run 'a b' $(date) \"$(hostname)\" `nproc`", ["date", "hostname", "nproc", "run 'a b' ''"]),
        ("nvidia-smi | wc -l && run", ["nvidia-smi", "wc -l", "run"]),
        ("if missing; then run; fi", ["missing", "run"]),
        ("if [ -f none ]; then run a; else run b; fi", ["run b"]),
        ("if [ -f script.sh ]; then run a; else run b; fi", ["run a"]),
        (
            'P=/usr/bin/python3\n$P x.py > none/log 2>&1\n"${P}" y.py',
            ["/usr/bin/python3 x.py", "/usr/bin/python3 y.py"],
        ),
        ("A=1 B='x y' /x/python a.py &> none/log", ["/x/python a.py"]),
        ("set -- 'a b' c\nrun \"$@\" $# > none/log", ["run 'a b' c 2"]),
        ("f() { run \"$1\" > none/log; /x/y $2; }\nf 'g h' i", ["run 'g h'", "/x/y i"]),
        ("nohup run --a 'b > c' > none/log 2>&1 &\nwait", ["nohup run --a 'b > c'"]),
        ("exec run a\nrun b", ["run a"]),
        ("set -eu\ncd none\nrun", ["run"]),
        ("run $HOME/a ~/b $PWD/c", [f"run {Path.home()}/a {Path.home()}/b WORKING/c"]),
        ("F=$(cat <<EOF\n--a 1\nEOF\n)\nrun $F", ["run --a 1"]),
        ("run $(dirname a/b/c) $(basename a/b.sh .sh) $(realpath a)", ["run a/b b WORKING/a"]),
        ("env -i run; command run a; builtin eval 'run b'", ["env -i run", "run a", "run b"]),
        ("bash <<EOF\nrun $((1 + 1)) \\${A-}\nEOF", ["run 2"]),
        ("A=1 X=2; export X\nbash -x -c 'run $0 $1 $X ${A-none}' b c", ["run b c 2 none"]),
        ("srun -c 8 /bin/sh -c 'cd code; run a' | tee log", ["run a", "tee log"]),
        ("sbatch -c 4 --wrap='run a'; sbatch --wrap 'run b'", ["run a", "run b"]),
        ("sbatch -N 2 <<'EOF'\n#!/bin/bash\nA=4\nbash <<< \"run $A\"\nEOF", ["run 4"]),
        ("torchrun pretrain_gpt.py --a job.sh bash", ["torchrun pretrain_gpt.py --a job.sh bash"]),
        ('for i in 1 2 3; do srun bash -c "run $i" & done; disown -a', ["run 1", "run 2", "run 3"]),
        (
            "export PATH=/usr/bin:/bin\nenv x.py > none/log; command env y.py; env z.py",
            ["env x.py", "env y.py", "env z.py"],
        ),
        (
            "${P:-/x/p} a\n"
            "\"${P-/x y}\"/p b\n/x\\ y/p c\n'/x/q' d\nf() { \"$@\"; }; f /x/r e\nA=$(date) /x/s f\n/x/t 'g\n'",
            ["/x/p a", "'/x y/p' b", "'/x y/p' c", "/x/q d", "/x/r e", "date", "/x/s f", "/x/t 'g\n'"],
        ),
        (
            "set -e; mkdir -p a/b c; echo $1 > a/b/x; (run $(<a/b/x)) > c/log; mkdir ../../../x; exec > a/y; run b",
            ["mkdir -p a/b c", "run", "mkdir ../../../x", "run b"],
        ),
        (
            "set -e; echo a > /none/x; exec > /none/log 2>&1; f() { run a; }; f > /none/x; run b < none",
            ["run a", "run b"],
        ),
        ("set -e; cd /none/x; run $PWD $(pwd); docker bash -c 'cd /w && /x/run'", ["run /none/x /none/x", "/x/run"]),
        ("set -e; source none a; . ~/none 2> /none/log; pushd /none > /dev/null; popd; run", ["run"]),
        ("[[ -z ${SLURM_JOB_ID-} ]] && { sbatch $0; exit; }\nrun $SLURM_JOB_ID", ["run 1"]),
        ("command -v none > /dev/null && type none && hash none || exit; run", ["run"]),
        ("set -ex; for ((i = 0; i < 500; i++)); do x=$i; done; (exec -a x run)", ["run"]),
        ("run $TMPDIR/a $USER $LOGNAME", ["run TEMPORARY/a you you"]),
    ],
)
def test_commands_of_a_script(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "you")
    monkeypatch.setenv("LOGNAME", "you")
    here, files = str(Path.cwd()), tempfile.gettempdir()
    assert sorted(texts(text)) == sorted(x.replace("WORKING", here).replace("TEMPORARY", files) for x in expected)


@pytest.mark.parametrize("inside", [True, False])
def test_files_beside_the_script_are_found(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("deep/er/a/b/c") if inside else tmp_path / "other"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "model.sh").write_text("declare -a LAYERS=($1)\n[ $LAYERS = 4 ] || return\nHIDDEN=64\n")
    (folder / "job.sh").write_text("$PYTHON x.py $0 $1 ${LAYERS-none} > none/log\n")
    Path("here.sh").write_text("HERE=1\n")
    lines = [
        'source "$(dirname "$0")/conf/model.sh" 4',
        ". ./here.sh",
        "export PYTHON=/x/python",
        'cd "$(dirname "$0")"',
    ]
    lines += ["run $LAYERS $HIDDEN $HERE $PWD", "./job.sh y", "sbatch -N 2 job.sh z", "echo x > job.sh"]
    actual = run_script.run_script(folder / "script.sh", "\n".join(lines).encode(), [], {})
    assert [shlex.join(words) for words in actual.commands] == [
        f"run 4 64 1 {folder.absolute()}",
        "/x/python x.py ./job.sh y none",
        "/x/python x.py job.sh z none",
    ], actual.notes
    assert "PYTHON" in (folder / "job.sh").read_text()


def test_large_and_hidden_files_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("large").write_bytes(b"x" * (run_script.SMALL + 1))
    Path(".hidden").write_text("x")
    os.mkfifo("pipe")
    Path("away").symlink_to("/")
    test = (
        'for f in large .hidden pipe away away/bin; do [ -e $f ] && A+="$f "; [ -s $f ] && A+="$f:full "; done; run $A'
    )
    assert texts(test) == ["run large pipe away away:full"]


def test_endless_scripts_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_script, "SECONDS", 1)
    actual = run("run a & while true; do run b; sleep 5; done & while true; do :; done")
    assert {("run", "a"), ("run", "b"), ("sleep", "5")} >= set(actual.commands)
    assert actual.notes[-1] == "stopped after 1 seconds"
    large = run("while echo 1234567890123456789012345678901234567890; do :; done > large; run", A="b")
    assert not large.commands


def test_the_environment_is_the_users_definitions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert texts("run ${SECRET-none} $A $PATH ${BASH_ENV-none}", A="a b", BASH_ENV="x", PATH="/bin") == [
        "run none a b /dev/null none"
    ]


def test_the_tool_says_that_builtins_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.sh").write_text("echo hello >&2; torchrun pretrain_gpt.py $1 ${2-}\n")
    with user_error("--num-attention-heads"):
        main(["--run-script", "script.sh", "--swiglu", "--bf16"])
    stderr = capsys.readouterr().err
    assert stderr.startswith("running script.sh by bash. Its builtins run: ") and "  hello" in stderr
    for text, name, message in (
        ("echo none; exit 3", "script.sh", r"script\.sh: no command runs a Python file"),
        ("", "nowhere.sh", r"^nowhere\.sh cannot be read: No such file or directory$"),
        ("", ".", r"^\. cannot be read: Is a directory$"),
        ("run\r\n", "script.sh", "line ends of Windows"),
    ):
        Path("script.sh").write_text(text)
        with pytest.raises(UserError, match=message):
            main([f"--run-script={name}"])
        assert ("  none\n  the script ended with 3\n" in capsys.readouterr().err) == bool("none" in text)
    with user_error("--define"):
        main(["--define==x", "--run-script", "script.sh"])


def test_without_bash_or_seccomp_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined_bash, "__file__", str(Path("no_filter.py")))
    Path("no_filter.py").write_text(f"raise SystemExit({confined_bash.NO_FILTER})")
    with user_error("--run-script"):
        run("run")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with user_error("--run-script"):
        run("run")


ATTACKS = [
    "/bin/rm VICTIM", "./program", "PROGRAM", "X=PROGRAM; $X a", 'X=PROGRAM; "${X}" a', "X=(PROGRAM a); ${X[@]}",
    "exec PROGRAM", "exec -c PROGRAM", "builtin exec PROGRAM", "builtin exec -a x PROGRAM", "command PROGRAM",
    "command -p rm VICTIM", "command -p env rm VICTIM", "env rm VICTIM", "/usr/bin/env rm VICTIM", "nohup PROGRAM",
    "time PROGRAM", "eval PROGRAM", "eval 'eval \"exec PROGRAM\"'", "PROGRAM &\nwait", "(PROGRAM)", "{ PROGRAM; }",
    "echo $(PROGRAM)", "echo `PROGRAM`", "true | PROGRAM | true", "read x < <(PROGRAM)", "echo x > >(PROGRAM)",
    "coproc PROGRAM; wait", "f() { PROGRAM; }; f", "trap - DEBUG; PROGRAM", "builtin trap - DEBUG; set +T; PROGRAM",
    "set +T; f() { PROGRAM; }; f", "set +o functrace; (PROGRAM)", "shopt -u extdebug; PROGRAM",
    "unset -f command_not_found_handle exec megajax_record megajax_skips; exec PROGRAM",
    'exec() { builtin exec "$@"; }; exec PROGRAM',
    "megajax_skips() { return 1; }; megajax_record() { PROGRAM; }; rm; PROGRAM",
    "command_not_found_handle() { exec PROGRAM; }; nothing", "PATH=/bin:/usr/bin rm VICTIM",
    "PATH=/bin:/usr/bin; rm VICTIM", "export PATH=/bin:/usr/bin; exec rm VICTIM", "hash -p /bin/rm x; x VICTIM",
    "BASH_CMDS[x]=/bin/rm; x VICTIM", "enable -f ./program.so x; x; PROGRAM",
    "builtin enable -f ./program.so x; PROGRAM", "enable exec; exec PROGRAM", "set -o posix; exec PROGRAM",
    "POSIXLY_CORRECT=1; exec PROGRAM", "BASH_ENV=PROGRAM bash -c true; export BASH_ENV=PROGRAM; /bin/bash -c true",
    "/bin/bash -c PROGRAM", "bash <<< PROGRAM", "sbatch <<EOF\n/bin/rm VICTIM\nEOF",
    "/lib64/ld-linux-x86-64.so.2 /bin/rm VICTIM", "trap PROGRAM EXIT", "trap 'exec PROGRAM' EXIT ERR; false",
    "PROMPT_COMMAND=PROGRAM; set -o history; set -m; PROGRAM & wait", "set -m; (exec PROGRAM) & disown; wait",
    "cd ORIGIN; ./program", "cd ORIGIN; PATH=.; program", "alias x=PROGRAM; shopt -s expand_aliases\nx",
    "mapfile -C PROGRAM -c 1 lines < /etc/passwd", "complete -C PROGRAM x; compgen -C PROGRAM", "fc -e PROGRAM",
    "kill -9 PROCESS", "builtin kill -TERM PROCESS; kill -9 -PROCESS", "echo x > VICTIM", ": > VICTIM",
    "exec > VICTIM; echo x", "builtin exec 3> VICTIM; echo x >&3", "cd ORIGIN; echo x > victim",
    "{ echo x; } > VICTIM", "for i in 1; do echo x; done > VICTIM", "torchrun pretrain_gpt.py > VICTIM",
]  # fmt: skip
WITH_LANDLOCK = [
    "echo x >| VICTIM",
    "echo x >> VICTIM",
    "set +C; echo x > VICTIM",
    "set +o noclobber; : > VICTIM",
    "echo x > ORIGIN/made",
    "printf x &> ORIGIN/made",
    "builtin exec 3<> ORIGIN/made",
]


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


@pytest.mark.parametrize("text", [*ATTACKS, *WITH_LANDLOCK])
def test_no_script_starts_a_program_or_changes_a_file_elsewhere(text: str, tmp_path: Path) -> None:
    if text in WITH_LANDLOCK and not has_landlock():
        pytest.skip("this kernel has no Landlock")
    origin = tmp_path / "origin"
    origin.mkdir()
    victim, program = origin / "victim", origin / "program"
    victim.write_text("as it was")
    (origin / "program.so").write_bytes(b"")
    program.write_text(f"#!/bin/sh\necho gone > {victim}\ntouch {origin}/made\n")
    program.chmod(0o755)
    shutil.copy(program, Path("program"))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeping:
        for name, value in {"PROGRAM": program, "VICTIM": victim, "ORIGIN": origin, "PROCESS": sleeping.pid}.items():
            text = text.replace(name, str(value))
        run(text)
        assert sleeping.poll() is None
        sleeping.kill()
    assert victim.read_text() == "as it was"
    assert sorted(path.name for path in origin.iterdir()) == ["program", "program.so", "victim"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["program", "script.sh"]
