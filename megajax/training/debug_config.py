"""The debug twin of a config: the same tree in sizes that run on a laptop."""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import MockConfig, StandardLibraryConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.protocol import ModelConfig, ids_below
from megajax.optim.config import ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig
from megajax.training.config import EvaluationConfig
from megajax.training.run_config import RunConfig


def debug_config(cfg: RunConfig, model: ModelConfig, **changes: Any) -> RunConfig:
    """`cfg` with a small model, made-up text, float32 and 20 steps of 8 rows, on one device or any layout.

    Optimizer, shape of the schedule and how documents are treated stay. changes: fields to set beside those.
    """
    settings = {
        "model": model,
        "parallel": ParallelConfig(),
        "precision": PrecisionConfig(compute="float32"),
        "schedule": replace(cfg.schedule, warmup_steps=None, warmup_samples=None, warmup_fraction=0.25),
        "batch": replace(cfg.batch, global_size=8, micro_size=1),
        "evaluation": EvaluationConfig(every=10, batches=2),
        "checkpoint": CheckpointConfig(every=10),
        "logging": replace(cfg.logging, prompt=None),  # mock data has no text
        "steps": 20,
        "run_dir": f"{cfg.run_dir}_debug",
    }
    vocabulary = ids_below(model)
    if vocabulary is not None:
        settings["data"] = MockConfig(isolate_documents="segment_ids" in cfg.data.leaves())
        settings["tokenizer"] = NullTokenizerConfig(vocabulary_size=vocabulary)
    return cfg.but(**settings | changes)


def library_twin(cfg: RunConfig, model: ModelConfig, **changes: Any) -> RunConfig:
    """`debug_config` for 60 steps on the source files of Python's standard library, in bytes: ids below 257."""
    settings = {
        "data": StandardLibraryConfig(isolate_documents=True),
        "tokenizer": ByteTokenizerConfig(),
        "schedule": ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        "evaluation": EvaluationConfig(every=30, batches=2),
        "checkpoint": CheckpointConfig(every=30),
        "steps": 60,
    }
    return debug_config(cfg, model, **settings | changes)
