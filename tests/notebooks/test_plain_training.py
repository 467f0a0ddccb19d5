"""The plain script trains as `python -m megajax.train` does, to the last bit, and resumes from its checkpoints."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "notebooks" / "plain_training.py"
LAYOUTS = {
    "one device": ((), ("--devices=cpu:1",)),
    "data 4 x tensor 2": (
        ("--data", "4", "--tensor", "2"),
        ("--devices=cpu:8", "--parallel.data=4", "--parallel.tensor=2", "--batch.micro_size=4"),
    ),
}


def run(*command: str, optimized: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs Python. optimized: as a user does, with the optimizations of LLVM, which tests leave out to compile fast."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" or not optimized}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(Path(os.environ["XDG_CACHE_HOME"]).with_name("compiled"))
    words = [sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=600)


def plain(*arguments: str, folder: Path, code: int = 0, optimized: bool = False) -> str:
    done = run(str(SCRIPT), "--out", str(folder), *arguments, optimized=optimized)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def losses(output: str) -> dict[int, np.float32]:
    return {int(step): np.float32(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+),", output, re.M)}


@pytest.mark.parametrize("layout", ["one device", pytest.param("data 4 x tensor 2", marks=pytest.mark.slow)])
def test_losses_are_those_of_the_command(layout: str, tmp_path: Path) -> None:
    of_script, of_command = LAYOUTS[layout]
    settings = ("--steps=6", "--evaluation.every=none", "--evaluation.batches=0", "--checkpoint.every=none")
    command = ("-m", "megajax.train", "--config=quickstart.py", f"--run_dir={tmp_path / 'run'}")
    quiet = ("--logging.sample=false", "--logging.plot=false", "--logging.report=false")
    done = run(*command, *settings, *quiet, *of_command, optimized=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = {line["step"]: np.float32(line["loss"]) for line in lines if "split" not in line}
    output = plain(*of_script, "--steps", "6", folder=tmp_path / "plain", optimized=True)
    assert losses(output) == expected and len(expected) == 6
    assert "\nclass " in output


@pytest.mark.parametrize("mesh", [(), pytest.param(("--data", "2", "--tensor", "4"), marks=pytest.mark.slow)])
def test_it_resumes_with_the_same_losses_also_on_another_mesh(mesh: tuple[str, ...], tmp_path: Path) -> None:
    whole = losses(plain("--steps", "3", "--save-every", "1", folder=tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "00000003")
    assert "--resume" in plain("--steps", "3", folder=tmp_path, code=2)
    resumed = losses(plain("--steps", "3", "--resume", *mesh, folder=tmp_path))
    assert [*resumed] == [3]
    np.testing.assert_allclose(resumed[3], whole[3], rtol=1e-5 if mesh else 0)


@pytest.mark.parametrize("words", ["--data 3", "--tensor 3", "--steps 0", "--data 0"])
def test_wrong_numbers_are_refused_before_anything_is_built(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("plain_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as refused:
        script.arguments([*words.split(), "--out", str(tmp_path)])
    assert refused.value.code == 2 and words in capsys.readouterr().err
