"""What a resume compares: settings that change the numbers are reported, other settings are not."""

from typing import Any

import pytest
from small_jobs import VOCABULARY, model, run_config

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import MockConfig
from megajax.job.notebook import prepare
from megajax.job.start.resume import changes, facts
from megajax.metrics.config import LoggingConfig
from megajax.optim.config import AdamWConfig
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig

DRIFT: dict[str, tuple[dict[str, Any], str, str]] = {
    "hidden": ({"model": model(hidden=32)}, "model.hidden", "16 -> 32"),
    "vocabulary": ({"model": model(vocabulary_size=2 * VOCABULARY)}, "model.vocabulary_size", "64 -> 128"),
    "tokenizer": ({"tokenizer": NullTokenizerConfig(vocabulary_size=63)}, "tokenizer.vocabulary_size", "64 -> 63"),
    "optimizer": ({"optimizer": AdamWConfig(beta2=0.5)}, "optimizer.beta2", "-> 0.5"),
    "seed": ({"seed": 5}, "seed", "1234 -> 5"),
    "global batch": ({"batch": BatchConfig(global_size=16, micro_size=4)}, "batch.global_size", "8 -> 16"),
    "data": ({"data": MockConfig(seed=7)}, "data.seed", "null -> 7"),
}
FREE: dict[str, dict[str, Any]] = {
    "microbatches": {"batch": BatchConfig(global_size=8, micro_size=2)},
    "checkpoints": {"checkpoint": CheckpointConfig(every=1, changed_data="accept")},
    "logging": {"logging": LoggingConfig(every=3)},
    "reading": {"data": MockConfig(loader=LoaderConfig(threads=3, retries=1))},
}


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return facts(prepare(run_config()))


@pytest.mark.parametrize(
    "case", [case if case in ("seed", "data") else pytest.param(case, marks=pytest.mark.slow) for case in DRIFT]
)
def test_changed_settings_are_named_with_both_values(before: dict[str, Any], case: str) -> None:
    settings, name, text = DRIFT[case]
    assert text in changes(before, facts(prepare(run_config(**settings))))[name]


@pytest.mark.parametrize("case", FREE)
def test_settings_that_change_no_number_may_differ(before: dict[str, Any], case: str) -> None:
    assert changes(before, facts(prepare(run_config(**FREE[case])))) == {}
