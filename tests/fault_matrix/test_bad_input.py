"""Mistakes of users: one clear message with both values and the remedy, exit code 2, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.command_line.parser import parse
from megajax.config.errors import UserError
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.models.decoder.config import text_schema

BASE = ["--config=llama3.py:debug", "--devices=cpu:8"]

WRONG = {
    "misspelt": (["--paralel.tensor=2"], ["no such setting", "parallel.tensor"]),
    "not a number": (["--steps=many"], ["steps", "'many'"]),
    "no such choice": (["--parallel.data_sharding=zero2"], ["'zero2'", "zero1"]),
    "heads": (["--model.stack.pattern.0.mixer.heads=7"], ["heads=7", "kv_heads=2"]),
    "hidden": (["--model.hidden=65"], ["hidden=65", "heads=4"]),
    "schedule": (
        ["--schedule.warmup_steps=50", "--schedule.warmup_fraction=none"],
        ["warm-up takes", "warmup_steps=50", "steps=20", "a larger --steps"],
    ),
    "two warm-ups": (["--schedule.warmup_samples=5"], ["warmup_samples and warmup_fraction"]),
    "optimizer": (["--optimizer.beta2=1.5"], ["beta2", "1.5"]),
    "dropout": (["--model.dropout=-1"], ["model.dropout", "-1"]),
    "ffn": (["--model.stack.pattern.0.mlp.ffn=0"], ["mlp.ffn", "at least 1"]),
    "heads of nothing": (["--model.stack.pattern.0.mixer.heads=0"], ["mixer.heads", "at least 1"]),
    "epsilon": (["--optimizer.epsilon=0"], ["optimizer.epsilon", "above 0"]),
    "infinite": (["--schedule.lr=inf"], ["schedule.lr", "inf"]),
    "no folder": (["--run_dir="], ["run_dir", "empty"]),
    "too many rows": (["--steps=1e9"], ["8000000000 rows", "2147483647"]),
    "with a faulty one": (["--steps=many", "--parallel.tensor=8"], ["'many'", "heads=4"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_setting_is_named_with_its_remedy(case: str) -> None:
    settings, expected = WRONG[case]
    with pytest.raises(UserError) as raised:
        parse([*BASE, *settings], verb="train")
    for text in expected:
        assert text in str(raised.value), str(raised.value)


def test_all_problems_are_reported_together() -> None:
    settings = [
        setting for case in ("misspelt", "not a number", "no such choice", "optimizer") for setting in WRONG[case][0]
    ]
    with pytest.raises(UserError) as raised:
        parse([*BASE, *settings], verb="train")
    assert str(raised.value).startswith("4 problems")


def run(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megajax.train", *BASE, f"--run_dir={tmp_path / 'run'}", *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file with its bytes, except the lock, which names the process that last held it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(200):
            writer.add_document([np.arange(document, document + 100, dtype=np.uint16)])
    return prefix


BROKEN = {
    "truncated bin": (".bin", lambda content: content[:-10], ["corpus.bin", "40000", "39990"]),
    "truncated idx": (".idx", lambda content: content[:-8], ["corpus.idx"]),
    "magic": (".idx", lambda content: b"NOTANIDX\0" + content[9:], ["corpus.idx", "NOTANIDX"]),
    # The lowest byte of the offset of sequence 5, after the header and the lengths.
    "offset": (".idx", lambda content: content[:874] + b"\xe9" + content[875:], ["corpus.idx", "1000", "1001"]),
}
"""Suffix of the file, how it is changed, and the words of the message."""

DATA = ["--data.type=BlendConfig", "--data.split=90,5,5", "--tokenizer.vocabulary_size=512"]


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_token_file_is_named(case: str, corpus: Path) -> None:
    from_command_line = parse([*BASE, *DATA, f"--data.paths={corpus}"], verb="train").config
    suffix, change, expected = BROKEN[case]
    path = corpus.with_suffix(suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as raised:
        from_command_line.data.build(
            tokenizer=from_command_line.tokenizer.build(), schema=text_schema(64, 2**31), rows=(10, 2, 2), seed=1
        )
    for text in expected:
        assert text in str(raised.value), str(raised.value)


def test_an_unavailable_kernel_is_an_error(tmp_path: Path) -> None:
    cfg = parse([*BASE, "--model.stack.pattern.0.mixer.kernel=cudnn"], verb="train").config
    with user_error():
        set_up(cfg)


def test_evaluating_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    cfg = parse([*BASE, f"--run_dir={tmp_path / 'run'}"], verb="train").config
    with user_error("--skip-train"):
        train(cfg, skip_train=True)


def test_exit_code_and_nothing_written(corpus: Path, tmp_path: Path) -> None:
    corpus.with_suffix(".bin").unlink()
    done = run(tmp_path, *DATA, f"--data.paths={corpus}", f"--data.cache_dir={tmp_path}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "corpus.bin" in done.stderr
    assert contents(tmp_path / "run") == {}


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_stops_the_run_with_its_position(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(50):
            tokens = np.full(100, 7, np.uint16)
            if document == 3:
                tokens[41] = 600
            writer.add_document([tokens])
    done = run(
        tmp_path,
        *DATA,
        f"--data.paths={prefix}",
        f"--data.cache_dir={tmp_path}",
        "--data.split=100,0,0",
        "--evaluation.every=none",
        "--steps=20",
    )
    assert done.returncode == 2, done.stderr
    for text in ("600", "document 3", "41", "512"):
        assert text in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_run_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = run(tmp_path)
    assert done.returncode == 2 and "can't be written" in done.stderr
