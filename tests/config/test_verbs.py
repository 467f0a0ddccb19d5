"""`megajax` and `python -m megajax`: the list of verbs, and running a verb by name."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megajax
from megajax.__main__ import main, verbs

REPOSITORY = Path(megajax.__file__).parents[1]


def run(monkeypatch, capsys, *arguments):
    """Exit code, output, error output."""
    monkeypatch.setattr(sys, "argv", ["megajax", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_the_list_names_every_verb_with_one_line(monkeypatch, capsys):
    code, text, _ = run(monkeypatch, capsys)
    assert code == 0
    listed = dict(re.findall(r"^  ([\w.]+) +(\S.*)$", text, re.MULTILINE))
    assert listed == dict(verbs())
    assert {"train", "preprocess", "plan", "launch", "report", "doctor", "interop.megatron.args"} <= set(listed)
    assert "batch" not in listed and "interop.megatron.confined_bash" not in listed  # no verbs
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["fine-tune"], "no verb fine-tune\n    did you mean train?"),
        (["eval"], "did you mean evaluate?"),
        (["chat"], "did you mean generate?"),
        (["tools", "megatron-args"], "did you mean interop.megatron.args?"),
        (["--steps=3"], "no verb --steps=3\n    the verbs are train, "),
    ],
)
def test_an_unknown_verb_exits_with_2_and_the_nearest_name(monkeypatch, capsys, arguments, hint):
    code, _, message = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert hint in message


def test_the_version(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"megajax {megajax.__version__}\n", "")


def test_a_verb_gets_the_other_arguments(monkeypatch, capsys):
    code, _, message = run(monkeypatch, capsys, "tools.trace", "--top=3")
    assert code == 2
    assert "the first argument must be a folder or a file, got --top=3" in message


def test_the_list_imports_nothing_heavy():
    program = (
        "import sys; from megajax.__main__ import main\ntry: main()\n"
        "except SystemExit: print(sorted({'jax', 'numpy', 'megajax.training'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"


def test_the_console_script_and_the_folders_that_git_ignores():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"megajax": f"{main.__module__}:main"}
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    # With a leading slash, because megajax/data is code.
    assert {"/data/", "/runs/"} <= set(ignored) and "data/" not in ignored
