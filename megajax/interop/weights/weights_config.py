"""The config of a run that starts from converted weights. Only model and tokenizer come from them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.config.dump import flatten, scalar_text
from megajax.config.errors import UserError
from megajax.config.read_limits import read_file
from megajax.data.configs import DataConfig
from megajax.data.images.config import ClassFoldersConfig, ImageTextConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.data.text.config import BlendConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.protocol import ModelConfig, ids_below
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.base import LIMITS
from megajax.tokenizers.config import TokenizerBuilder, TokenizerConfig
from megajax.tokenizers.tokenizer_files import special_token_ids, vocabulary_files, with_copies
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig

DATA: tuple[DataConfig, ...] = (
    BlendConfig(paths=("data/corpus_text_document",), isolate_documents=True),
    MaskedSentencesConfig(paths=("data/corpus_text_sentence",)),
    MaskedSentencesConfig(paths=("data/corpus_text_sentence",), next_sentence=False),
    MaskedSpansConfig(paths=("data/corpus_text_sentence",)),
    ClassFoldersConfig(path="data/images"),
    ImageTextConfig(paths=("data/captions.jsonl",)),
)
"""Candidates for the data setting; the first one with the leaves that a model reads is used."""


def weights_config(model: ModelConfig, tokenizer: TokenizerConfig, run: Path) -> RunConfig:
    """A config that trains from the weights of `run` in a new folder. The user has to set the path of the data."""
    reads = {name: leaf.dtype for name, leaf in model.schema().items() if not leaf.optional}
    fitting = [data for data in DATA if reads.items() <= data.leaves().items()]
    return RunConfig(
        model=model,
        tokenizer=tokenizer,
        data=fitting[0] if fitting else DATA[0],
        parallel=ParallelConfig(data_sharding="fsdp"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=1e-5, min_lr=1e-6, warmup_fraction=0.03),
        batch=BatchConfig(global_size=32, micro_size=1),
        evaluation=EvaluationConfig(every=100, batches=4),
        checkpoint=CheckpointConfig(weights=(WeightsConfig(run=run),)),
        run_dir=f"{run}-tuned",
    )


def continued_config(cfg: RunConfig, run: Path, files: Path, copied: Path) -> RunConfig:
    """The config of a run that starts from weights derived from another run's, with that run's config.

    files, copied: the folder of the other run's tokenizer, and its copy.
    """
    checkpoint = replace(cfg.checkpoint, load=None, parts="all", step=None, weights=(WeightsConfig(run=run),))
    return replace(cfg, tokenizer=_copied(cfg.tokenizer, files, copied), checkpoint=checkpoint, run_dir=f"{run}-tuned")


def _copied(tokenizer: Any, files: Path, copied: Path) -> Any:
    """A tokenizer config that reads the copies of its files in `files`, unless the originals have changed since."""
    pair = tokenizer, with_copies(tokenizer, files, files)
    originals, copies = (vocabulary_files(getattr(config, "base", config)) for config in pair)
    for name, path in originals.items():
        if path.is_file() and read_file(path, LIMITS) != read_file(copies[name], LIMITS):
            return tokenizer
    return with_copies(tokenizer, files, copied)


def model_facts(cfg: RunConfig) -> dict[str, Any]:
    """Settings of the model as a checkpoint records them."""
    return recorded({name: value for name, value in flatten(cfg).items() if name.startswith("model.")})


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a checkpoint records them: numbers, and texts of other values."""
    return {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else scalar_text(value)
        for name, value in values.items()
    }


def special_tokens(model: ModelConfig, tokenizer: TokenizerBuilder) -> dict[str, int | None]:
    """Special tokens for a config.json, in place of its family's defaults.

    A token is None if the tokenizer has no such token or its files are missing.
    """
    if ids_below(model) is None:
        return {}
    try:
        return special_token_ids(tokenizer.build())
    except UserError:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
