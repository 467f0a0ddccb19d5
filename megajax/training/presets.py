"""RunConfigs with most settings chosen: runs on your own text, and debug versions of larger configs."""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.text.config import BlendConfig, MockConfig, StandardLibraryConfig
from megajax.layers.recompute import Recompute, Recomputing
from megajax.mesh.config import ParallelConfig
from megajax.models.facts import demand_facts
from megajax.models.protocol import ModelConfig, ids_below
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import ByteTokenizerConfig, HuggingFaceTokenizerConfig, NullTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig


def own_text(
    name: str,
    model: ModelConfig,
    *,
    schedule: ScheduleConfig,
    rows: int,
    steps: int,
    side_by_side: int = 1,
    **changes: Any,
) -> RunConfig:
    """A run on token files in data/ with their tokenizer: `rows` rows per step, one per microbatch.

    Documents do not attend to each other. changes: other fields of the config.

    Example: `mj.own_text("mine", mj.llama3("8b"), schedule=mj.ScheduleConfig(lr=3e-4), rows=512, steps=10_000)`
    """
    settings: dict[str, Any] = {
        "data": BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        "tokenizer": HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        "optimizer": AdamWConfig(beta2=0.95, weight_decay=0.1),
        "batch": BatchConfig(global_size=rows, micro_size=1, side_by_side=side_by_side),
        "evaluation": EvaluationConfig(every=1000, batches=4),
        "checkpoint": CheckpointConfig(every=250),
        "run_dir": f"runs/{name}",
    }
    return RunConfig(model=model, schedule=schedule, steps=steps, **settings | changes)


def on_layout(
    cfg: RunConfig,
    parallel: ParallelConfig,
    recompute: Recompute = "selective",
    *,
    layers: int | None = None,
    micro_size: int = 1,
    side_by_side: int = 1,
) -> RunConfig:
    """The same run on another layout, such as that of GPUs with more memory: its losses stay the same.

    layers: those of each chunk that recompute, as model.recompute_layers.

    Example: `mj.on_layout(mj.load("llama3.py"), mj.ParallelConfig(data_sharding="fsdp"), "full", micro_size=2)`
    """
    return cfg.but(
        parallel=parallel,
        model=demand_facts(cfg.model).with_recomputing(Recomputing(recompute=recompute, layers=layers)),
        batch=replace(cfg.batch, micro_size=micro_size, side_by_side=side_by_side),
    )


def debug_config(cfg: RunConfig, model: ModelConfig, **changes: object) -> RunConfig:
    """The debug version of `cfg`: a small model, mock data, float32 and 20 steps of 8 rows, for a laptop.

    Keeps the optimizer, the shape of the schedule and the isolation of documents. changes: other fields of the config.

    Example: `mj.debug_config(mj.load("gpt3.py:gpt3_1_3b"), mj.gpt3("debug"))`
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


def library_debug_config(cfg: RunConfig, model: ModelConfig, **changes: object) -> RunConfig:
    """`debug_config` for 60 steps on the source files of Python's standard library, as bytes: ids below 257.

    Example: `mj.library_debug_config(mj.load("mixtral.py"), mj.mixtral("debug", vocabulary_size=257))`
    """
    settings = {
        "data": StandardLibraryConfig(isolate_documents=True),
        "tokenizer": ByteTokenizerConfig(),
        "schedule": ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        "evaluation": EvaluationConfig(every=30, batches=2),
        "checkpoint": CheckpointConfig(every=30),
        "steps": 60,
    }
    return debug_config(cfg, model, **settings | changes)
