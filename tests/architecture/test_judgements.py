"""Each judgement is made in one place: its words stand in no other file. A row here names the place."""

import re
from typing import NamedTuple

import pytest
from source_tree import modules

from megajax.processes.must_be_equal import IDENTITY, MUST_BE_EQUAL

pytestmark = pytest.mark.smoke


class Judgement(NamedTuple):
    """A question that the library answers, and the text without which nobody answers it."""

    question: str
    pattern: str
    """A regular expression that a second answer would have to contain: in code or strings of the library."""
    places: tuple[str, ...]
    """Modules that may contain it; a package stands for all modules in it."""


JUDGEMENTS = (
    Judgement(
        "how a part of a save is recorded",
        r"chunk_grid",
        ("megajax.checkpoint.pack_writer", "megajax.checkpoint.zarr_reader", "megajax.interop"),
    ),
    Judgement("how rows reach the devices of their experts", r"class \w+\(Dispatch\)|WAYS\[", ("megajax.layers.moe",)),
    Judgement("how long a request may be", r'RefusedRequest\("too_long"', ("megajax.inference.admission",)),
    Judgement("which errors follow from a lost process", r"(?i)socket closed", ("megajax.faults.attempt_end",)),
    Judgement("which process is ahead", r"list\(Stage\)", ("megajax.faults.activity",)),
    Judgement(
        "how an attempt ended",
        r"ATTEMPT_END\b|attempt_end\"",
        ("megajax.faults", "megajax.job", "megajax.launcher.supervisor", "megajax.reporting.attempts"),
    ),
    Judgement("what a failure is called", r"ended at once, unsaved", ("megajax.faults.attempt_end",)),
    Judgement("what a line of metrics and events is", r"LineFormat\(", ("megajax.metrics.record",)),
    Judgement(
        "what a machine can do",
        r"nvmlDeviceGet(?!Handle|Count|Index)\w*(?:Ecc|Remapped|Throttle)|wrong (?:products|sums)",
        ("megajax.machine",),
    ),
    Judgement("what bounds of a number say", r"class Bounds\b|must be finite and \{self", ("megajax.config.bounds",)),
    Judgement(
        "whether a setting is within bounds; not of users' own classes, of pairs, and of what is no setting",
        r"must be (?:at least|above|below|at most) -?[\d.]+(?: (?!with)[^\"{]*)?, got",
        (
            "megajax.config",
            "megajax.interop",
            "megajax.optim.config",
            "megajax.pipeline.schedule",
            "megajax.training.config",
        ),
    ),
    Judgement("what a split is", r"class Readable\b|^type Split\b", ("megajax.data.rows.config",)),
    Judgement("whether a layout is legal", r"elastic=False\)\)\.problems", ("megajax.planning.choice",)),
    Judgement("which options XLA gets", r"XLA_FLAGS", ("megajax.processes.xla_options",)),
    Judgement("which tokens a folder has", r"added_tokens\.json", ("megajax.tokenizers",)),
    Judgement(
        "what the towers of a model add to its facts, checks and kernels",
        r"(tower|self\.(vision|encoder|teacher))\.(kernel_choices|with_kernels|parallel_problems|matmul_sides|refit)\(",
        ("megajax.models.transformer",),
    ),
    Judgement("which mixers see later positions", r'getattr\(\w+, "causal"', ("megajax.models.transformer",)),
    Judgement(
        "what must be equal, and what is said if it is not",
        r"other files than process 0|different schedules of the|\(stored -> requested\)|reproducibly computed other"
        r"|the copies of \{|has another tokenizer: |class Equality\b",
        ("megajax.processes.must_be_equal",),
    ),
    Judgement("how arrays are hashed", r"0x01000193", ("megajax.mesh.array_hash",)),
    Judgement("how files are hashed for a comparison", r"class FileSum\b", ("megajax.data.checksum",)),
    Judgement(
        "where weights come from, and whether they fit a model's",
        r"\b(demand_same_depth|stored_groups|open_step|StepWeights|StoredModel|MergedWeights)\(|\bProvenance\.of|:read_model",
        ("megajax.interop.weights",),
    ),
)


@pytest.mark.parametrize("judgement", JUDGEMENTS, ids=lambda judgement: judgement.question)
def test_a_judgement_is_made_in_one_place(judgement: Judgement) -> None:
    answers = {name for name, module in modules().items() if re.search(judgement.pattern, module.text)}
    inside = {name for name in answers for place in judgement.places if f"{name}.".startswith(f"{place}.")}
    assert inside, f"nothing in {judgement.places} answers it any more: mend the row"
    assert answers <= inside, f"ask {judgement.places} instead"


def test_each_row_of_what_must_be_equal_has_one_place_that_compares() -> None:
    """The rows of an identity are compared together, by `difference`."""
    for row in MUST_BE_EQUAL.keys() - set(IDENTITY):
        places = [name for name, module in modules().items() if f'MUST_BE_EQUAL["{row}"]' in module.text]
        assert len(places) == 1, f"{row}: {places}"
