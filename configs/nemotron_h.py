"""Nemotron-H (NVIDIA 2025): Mamba-2, MLPs and a few layers of attention, on your own text. `config()` is nemotron_h_8b.

Sizes are those of the released configs: config.json of nvidia/Nemotron-H-8B-Base-8K and nvidia/Nemotron-H-56B-Base-8K.
Every size has a debug twin, which trains on the source files of Python's standard library: nemotron_h_56b_debug for
nemotron_h_56b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Run:      python -m megajax.train --config=nemotron_h.py                    (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=nemotron_h.py:debug --devices=cpu:8 --parallel.tensor=2 --parallel.pipeline=2
Hardware: each size names its own; not yet run on GPUs
"""

from dataclasses import replace

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig
from megajax.models.presets.mamba import nemotron_h
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.debug_config import library_twin
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """The 8B size."""
    return nemotron_h_8b()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return nemotron_h_8b_debug()


def nemotron_h_8b() -> RunConfig:
    """52 layers, 4 of them attention. 32 GPUs with 80 GB, tensor 2 x data 16."""
    return _own_text("nemotron_h_8b", nemotron_h("8b"), ParallelConfig(tensor=2, sequence=True))


def nemotron_h_56b() -> RunConfig:
    """118 layers, 10 of them attention. 256 GPUs with 80 GB, tensor 8 x FSDP over data 32."""
    model = replace(nemotron_h("56b"), recompute="full")
    return _own_text("nemotron_h_56b", model, ParallelConfig(tensor=8, sequence=True, data_sharding="fsdp"))


def nemotron_h_8b_debug() -> RunConfig:
    """nemotron_h_8b in tiny sizes, on one device or any layout."""
    return library_twin(nemotron_h_8b(), _debug_model())


def nemotron_h_56b_debug() -> RunConfig:
    """nemotron_h_56b in tiny sizes: tensor 2 x FSDP over data 4 on eight devices."""
    parallel = ParallelConfig(tensor=2, sequence=True, data_sharding="fsdp")
    return library_twin(nemotron_h_56b(), _debug_model(), parallel=parallel)


def _debug_model() -> DecoderConfig:
    return nemotron_h("debug", sequence_length=64, vocabulary_size=257)


def _own_text(name: str, model: DecoderConfig, parallel: ParallelConfig) -> RunConfig:
    """768 rows of 8192 tokens of your own text a step; documents are kept apart."""
    return RunConfig(
        model=model,
        parallel=parallel,
        data=BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        tokenizer=HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=8e-4, min_lr=8e-6, warmup_steps=2000),
        batch=BatchConfig(global_size=768, micro_size=1),
        evaluation=EvaluationConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=250),
        steps=2_000_000,
        run_dir=f"runs/{name}",
    )
