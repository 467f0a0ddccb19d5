"""Qwen 3 with experts (Qwen team 2025) on your own text, a function per size. `config()` is qwen3_moe_30b_a3b.

Sizes are those of the released configs: config.json of Qwen/Qwen3-30B-A3B-Base and Qwen/Qwen3-235B-A22B. Learning rates
were not published. Every size has a debug twin, which trains on the source files of Python's standard library:
qwen3_moe_235b_a22b_debug for qwen3_moe_235b_a22b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=qwen3_moe.py --devices=h100:32
Run:      python -m megajax.train --config=qwen3_moe.py                     (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=qwen3_moe.py:debug --devices=cpu:8 --parallel.expert=4
Hardware: each size names its own; not yet run on GPUs
"""

from dataclasses import replace

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.layers.remat import Recompute
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig
from megajax.models.presets.qwen_moe import qwen3_moe
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.debug_config import library_twin
from megajax.training.run_config import RunConfig

RECOMPUTE: Recompute = ("norm", "activation", "mlp")
"""Rows of experts are not saved: their buffers have room for any choice of the router, eight times what is needed."""


def config() -> RunConfig:
    """The 30B-A3B size."""
    return qwen3_moe_30b_a3b()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return qwen3_moe_30b_a3b_debug()


def qwen3_moe_30b_a3b() -> RunConfig:
    """30.5 B parameters, 3.3 B active; 128 experts. 32 GPUs with 80 GB: expert 8 x data 4."""
    model = replace(qwen3_moe("30b-a3b", sequence_length=4096), recompute=RECOMPUTE)
    return _own_text("qwen3_moe_30b_a3b", model, ParallelConfig(expert=8))


def qwen3_moe_235b_a22b() -> RunConfig:
    """235 B parameters, 22 B active; 128 experts. 256 GPUs with 80 GB: expert 16 x FSDP over data 16."""
    model = replace(qwen3_moe("235b-a22b", sequence_length=4096), recompute="full")
    return _own_text("qwen3_moe_235b_a22b", model, ParallelConfig(expert=16, data_sharding="fsdp"))


def qwen3_moe_30b_a3b_debug() -> RunConfig:
    """qwen3_moe_30b_a3b in tiny sizes, on one device or on eight."""
    return library_twin(qwen3_moe_30b_a3b(), _debug_model())


def qwen3_moe_235b_a22b_debug() -> RunConfig:
    """qwen3_moe_235b_a22b in tiny sizes: expert 2 x FSDP over data 4 on eight devices."""
    return library_twin(qwen3_moe_235b_a22b(), _debug_model(), parallel=ParallelConfig(expert=2, data_sharding="fsdp"))


def _debug_model() -> DecoderConfig:
    return qwen3_moe("debug", sequence_length=64, vocabulary_size=257)


def _own_text(name: str, model: DecoderConfig, parallel: ParallelConfig) -> RunConfig:
    """1024 rows of 4096 tokens of your own text a step; documents do not attend to each other."""
    return RunConfig(
        model=model,
        parallel=parallel,
        data=BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        tokenizer=HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000),
        batch=BatchConfig(global_size=1024, micro_size=1),
        evaluation=EvaluationConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=250),
        steps=1_000_000,
        run_dir=f"runs/{name}",
    )
