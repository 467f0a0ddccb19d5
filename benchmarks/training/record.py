"""How soon a file of settings has a validation loss of 1.55 on two processor cores: the record of docs/record.md."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megajax as mj
from benchmarks.outcome import rounded
from megajax.config import field_types
from megajax.config.errors import UserError

LOSS, CORES, ROWS, SEEDS = 1.55, 2, 512, (1, 2, 3)
"""The goal in nats per byte, the cores that a run may use, the rows of its validation, and the seeds of its runs."""
FIXED: Mapping[str, Any] = {
    "data": mj.StandardLibraryConfig(megabytes=8, seed=1234),
    "tokenizer": mj.ByteTokenizerConfig(),
    "model.sequence_length": 128,
    "model.vocabulary_size": 257,
    "checkpoint.load": None,
    "checkpoint.weights": (),
    "evaluation.sets": {},
}
"""What settings may not change: the text, its bytes, the rows of the validation split, and a start from nothing."""
GIVEN = ("data.seed=1234", "evaluation.every=none", "evaluation.at_end=true", "xla.compile_cache_dir=none")
"""What every run gets: one evaluation, at its end, so all read the same rows and none is the best of several."""


def record(*, settings: str = "quickstart.py", loss: float = LOSS, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """The processor and wall time of runs whose mean validation loss is at most --loss, with imports and compiling.

    Each seed is a run in a process of its own with an empty cache, whose time ends when the validation loss of its last
    step is known. `--json` keeps the row. docs/record.md has the rules, and the table that a better row joins.
    """
    given = rules_for(mj.load(settings, *GIVEN))
    runs = [timed(settings, (*GIVEN, given, f"seed={seed}")) for seed in seeds]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    row = {"settings": settings, **mean, "python": sys.version.split()[0], "runs": runs}
    high = {"wrong": f"the mean validation loss is above {loss}"} if mean["validation_loss"] > loss else {}
    return rounded(row) | high


def rules_for(cfg: mj.RunConfig) -> str:
    """The setting that makes an evaluation read ROWS rows. Raises UserError if a run's time were not comparable."""
    changed = [name for name, value in FIXED.items() if setting(cfg, name) != value]
    if not isinstance(cfg.model, mj.DecoderConfig):
        changed.append("model")
    if ROWS % cfg.batch.global_size:
        changed.append(f"batch.global_size, which has to divide {ROWS}")
    if changed:
        raise UserError(f"the rules of the record fix {', '.join(changed)}: see docs/record.md")
    return f"evaluation.batches={ROWS // cfg.batch.global_size}"


def setting(cfg: object, name: str) -> object:
    """The value of a dotted setting; None if the config has another class there, without it."""
    for part in name.split("."):
        known = field_types.is_config(cfg) and any(field.name == part for field in field_types.fields(type(cfg)))
        cfg = getattr(cfg, part) if known else None
    return cfg


def timed(settings: str, given: tuple[str, ...]) -> dict[str, float]:
    """The times of a run in a process of its own, and its validation loss. Raises UserError if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{word}" for word in (*given, f"run_dir={folder}/run")]
        command = [sys.executable, "-m", "megajax.train", f"--config={settings}", "--devices=cpu:1", *words]
        log, metrics = Path(folder, "log.txt"), Path(folder, "run/metrics.jsonl")
        environment, used, began = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}, os.times(), time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, sorted(os.sched_getaffinity(0))[:CORES])
        while (found := validation_loss(metrics)) is None and process.poll() is None:
            time.sleep(0.05)
        wall = time.monotonic() - began
        process.kill()
        process.wait()
        if (found := found or validation_loss(metrics)) is None:
            raise UserError(f"a run of {settings} ended without a validation loss:\n{log.read_text()[-2000:]}")
    now = os.times()
    seconds = now.children_user - used.children_user + now.children_system - used.children_system
    return {"validation_loss": found, "processor_seconds": seconds, "wall_seconds": wall}


def validation_loss(metrics: Path) -> float | None:
    """The loss of the validation split in a run's file of metrics; None if it is not there yet."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n") and '"split"' in line]
    return next((row["loss"] for row in rows if row["split"] == "validation"), None)
