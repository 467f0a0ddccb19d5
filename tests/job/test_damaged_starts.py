"""Damage that only the restore finds, in a block of a large file: runs and weights use the step before."""

import shutil
from pathlib import Path

import pytest
from run_folder import events
from small_jobs import losses, run_config

from megajax.checkpoint import manifest, verified_reads
from megajax.checkpoint.config import CheckpointConfig
from megajax.job.job import train


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 512)
    monkeypatch.setattr(verified_reads, "BLOCK_BYTES", 512)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK_BYTES", 512)
        assert train(run_config(folder)) == 0
    return folder


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))


def damage(run: Path, step: int) -> None:
    """Flips a bit in the middle of the largest file, which holds the arrays."""
    path = max((run / f"checkpoints/{step:08d}/arrays").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4  # Parameters come after moments.
    path.write_bytes(content)


def test_a_run_resumes_from_the_step_before_with_the_same_losses(
    run: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run, 6)
    assert train(run_config(run)) == 0
    assert losses(run) == losses(undisturbed)
    last = events(run)[-next(i for i, e in enumerate(reversed(events(run)), 1) if e["event"] == "start") :]
    kinds = {event["event"]: event for event in last}
    assert kinds["start"]["step"] == kinds["restored"]["step"] == 3
    assert kinds["checkpoint_damaged"]["step"] == 6 and "sha256" in kinds["checkpoint_damaged"]["why"]
    assert (kinds["checkpoint_fallback"]["from_step"], kinds["checkpoint_fallback"]["to_step"]) == (6, 3)
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert names == ["00000003", "00000006", "00000006.damaged"]
    output = capfd.readouterr()
    assert "checkpoint step 6" in output.err and "step 3 of" in output.out


def test_another_run_starts_from_the_step_before(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage(run, 6)
    assert train(run_config(tmp_path / "new", checkpoint=CheckpointConfig(load=run, parts="weights"))) == 0
    output = capfd.readouterr()
    assert "checkpoint step 6" in output.err and "damaged and was skipped" in output.err
    assert "step 3" in output.out and not (run / "checkpoints/00000006.damaged").exists()
