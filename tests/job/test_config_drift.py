"""What a resume compares: settings that change the numbers are reported, other settings are not."""

from typing import Any

import pytest
from small_jobs import DOCUMENTS, VOCABULARY, model, run_config

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import MockConfig
from megajax.job.notebook import prepare
from megajax.job.start.resume import changes, facts
from megajax.metrics.config import LoggingConfig
from megajax.optim.config import AdamWConfig
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return facts(prepare(run_config()))


def test_changed_settings_are_named_with_both_values(before: dict[str, Any]) -> None:
    changed = run_config(
        model=model(hidden=32, vocabulary_size=2 * VOCABULARY),
        tokenizer=NullTokenizerConfig(vocabulary_size=63),
        optimizer=AdamWConfig(beta2=0.5),
        seed=5,
        batch=BatchConfig(global_size=16, micro_size=4),
        data=MockConfig(documents=30, seed=7),
    )
    named = changes(before, facts(prepare(changed)))
    expected = {
        "model.hidden": "16 -> 32",
        "model.vocabulary_size": "64 -> 128",
        "tokenizer.vocabulary_size": "64 -> 63",
        "seed": "1234 -> 5",
        "batch.global_size": "8 -> 16",
        "data.documents": f"{DOCUMENTS} -> 30",
        "data.seed": "null -> 7",
    }
    assert expected.items() <= named.items() and named["optimizer.beta2"].endswith(" -> 0.5"), named


def test_settings_that_change_no_number_may_differ(before: dict[str, Any]) -> None:
    same = run_config(
        batch=BatchConfig(global_size=8, micro_size=2),
        checkpoint=CheckpointConfig(every=1, changed_data="accept"),
        logging=LoggingConfig(every=3),
        data=MockConfig(documents=DOCUMENTS, loader=LoaderConfig(threads=3, retries=1)),
    )
    assert changes(before, facts(prepare(same))) == {}
