"""The smallest complete run: synthetic data, one layer, batches of eight rows."""

import json
from pathlib import Path
from typing import Any

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.text.config import MockConfig
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.metrics.config import LoggingConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.optim.config import ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig

VOCABULARY = 64
DOCUMENTS = 300
"""A third of them, some 200,000 tokens, is enough for the longest of these runs: the index of its rows is small."""


def model(**changes: Any) -> DecoderConfig:
    settings = {"heads": 4, "kv_heads": 2, "rope": RopeConfig(), "ffn": 32, "hidden": 16, "sequence_length": 16}
    settings |= {"vocabulary_size": VOCABULARY, "recompute": "none", "dropout": 0.1, "repeats": 2} | changes
    mixer = AttentionConfig(**{name: settings.pop(name) for name in ("heads", "kv_heads", "rope")})
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=settings.pop("ffn")))
    return DecoderConfig(stack=StackConfig(pattern=(block,), repeats=settings.pop("repeats")), **settings)


def run_config(folder: Path | str = "unused", **changes: Any) -> RunConfig:
    """Six steps on one device, a checkpoint every third, evaluation at the end."""
    settings = {
        "model": model(),
        "data": MockConfig(documents=DOCUMENTS),
        "tokenizer": NullTokenizerConfig(vocabulary_size=VOCABULARY),
        "parallel": ParallelConfig(data=1),
        "precision": PrecisionConfig(compute="float32"),
        "schedule": ScheduleConfig(lr=1e-2, warmup_steps=2),
        "batch": BatchConfig(global_size=8, micro_size=4),
        "evaluation": EvaluationConfig(batches=1, at_end=True),
        "checkpoint": CheckpointConfig(every=3),
        "logging": LoggingConfig(every=1, plot=False, sample=False, live="never"),
        "steps": 6,
        "run_dir": str(folder),
    }
    return RunConfig(**settings | changes)


def losses(folder: Path) -> list[float]:
    """Losses of a run's steps."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "split" not in line]
