"""The commands of docs/checkpoints.md on an object store: one run from its first save to an export."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from object_stores import CREDENTIALS, serving

from megajax.storage.stores import open_store

pytest.importorskip("moto")
SECRETS = [CREDENTIALS[name].encode() for name in ("AWS_SECRET_ACCESS_KEY", "GOOGLE_AUTH_TOKEN_FOR_TESTING")]


def megajax(module: str, *words: str) -> str:
    """The output of a command that ends well."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    call = [sys.executable, "-m", f"megajax.{module}", *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_in_a_store_from_its_first_save_to_an_export(tmp_path: Path) -> None:
    small = ("--config=llama3.py:debug", "--devices=cpu:1", "--parallel.data=1", "--batch.micro_size=2")
    small += ("--batch.global_size=4", "--schedule.decay_steps=8", "--evaluation.every=none", "--steps=4")
    with serving("s3", tmp_path / "cache") as bucket:
        url = f"{bucket}/runs/a"
        first = (*small, f"--run_dir={tmp_path / 'a'}", f"--checkpoint.store={url}", "--checkpoint.every=1")
        megajax("train", *first, "--resilience.exit_after_steps=2")
        assert "step 2" in megajax("train", *first)  # resumes
        assert not any((tmp_path / "a/checkpoints").glob("0*"))
        shown = megajax("tools.inspect", url, "--verify")
        assert "00000004" in shown or "step 4" in shown, shown
        other = (
            *small,
            f"--run_dir={tmp_path / 'b'}",
            f"--checkpoint.load={url}",
            "--parallel.tensor=2",
            "--devices=cpu:2",
        )
        megajax("train", *other)
        megajax("convert", f"--from={url}", f"--to=hf:{tmp_path / 'llama'}")
        assert (tmp_path / "llama/config.json").exists()
        megajax("generate", f"--run={url}", "--prompt=1 2 3", "--max-tokens=2")
        stored = b"".join(bytes(open_store(url).read(name)) for name in open_store(url).names() if ".json" in name)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not [secret for secret in SECRETS if secret in stored + written]
