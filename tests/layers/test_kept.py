"""What layers keep for the backward pass: by name, in bytes, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import LENGTH, ONE, gpt, llama, program

from megajax.job.saved_bytes import KeptBytes, kept_bytes
from megajax.layers.remat import NAMES, PARTS, SELECTIVE, Recomputing

ROWS, HIDDEN, FFN, FLOAT = 6, 32, 64, 4
"""Rows of a microbatch of 4, and sizes of the small GPT."""

UNIT = ROWS * LENGTH * HIDDEN * FLOAT
PER_PART = {
    "norm": 2 * UNIT,
    "query_key_value": 3 * UNIT,
    "core_attention": UNIT,
    "residual": UNIT,
    "mlp": UNIT * FFN // HIDDEN,
    "activation": UNIT * FFN // HIDDEN,
    "input": UNIT,
    "latent": 0,
    "gate": 0,
}
"""Bytes of each part in a layer of it."""


def kept(**changes: Any) -> list[KeptBytes]:
    return kept_bytes(program(replace(gpt(dropout=0.0, repeats=4), **changes), ONE, microbatches=4))


def test_every_part_keeps_its_tensors_and_no_more():
    everything = sum(kept(recompute="none")[0][1:3])
    for again in [(part,) for part in PARTS if part != "input"] + [SELECTIVE, ("norm", "activation", "mlp")]:
        (found,) = kept(recompute=again)
        expected = sum(size for part, size in PER_PART.items() if part not in again)
        assert found == KeptBytes(4, expected, 0, everything - expected), again


def test_what_is_offloaded_is_kept_in_host_memory():
    (found,) = kept(recompute="selective", offload=("query_key_value", "mlp"))
    away = PER_PART["query_key_value"] + PER_PART["mlp"]
    (before,) = kept(recompute="selective")
    assert (found.device, found.host, found.again) == (before.device - away, away, before.again)
    (full,) = kept(recompute="full", offload=("input",))
    assert (full.device, full.host) == (0, UNIT)


def test_some_layers_and_several_together():
    first, others = kept(recompute="full", recompute_layers=1)
    assert (first.layers, first.device, others.layers) == (1, UNIT, 3)
    assert others == kept(recompute="selective")[0]._replace(layers=3)
    _, all_kept = kept(recompute="selective", recompute_layers=3)
    assert (all_kept.layers, all_kept.again) == (1, 0)
    (together,) = kept(recompute="full", recompute_together=2)
    assert (together.layers, together.device) == (4, UNIT // 2)


def test_the_residual_stream_may_be_float32():
    """What is computed from it stays in bfloat16."""

    def bytes_of(residual: str, *parts: str) -> int:
        again = tuple(part for part in PARTS if part not in ("input", *parts))
        model = replace(gpt(dropout=0.0, repeats=4), residual=residual, recompute=again)
        return kept_bytes(program(model, ONE, microbatches=4, compute="bfloat16"))[0].device

    assert bytes_of("compute") == UNIT // 2 and bytes_of("float32") == UNIT
    assert bytes_of("float32", "residual") == 2 * UNIT
    assert bytes_of("float32", "norm", "query_key_value", "mlp") == UNIT + (2 + 3 + 2) * UNIT // 2


def test_synonyms():
    assert Recomputing(recompute="selective").kept() == Recomputing(recompute=SELECTIVE).kept()
    everything = tuple(part for part in PARTS if part != "input")
    assert Recomputing(recompute="full").kept() == Recomputing(recompute=everything).kept()
    assert set(NAMES) == set(PARTS)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"recompute": ("norm", "input")}, "recompute", "all else is computed from"),
        ({"recompute": ("norm", "norm")}, "recompute", "norm twice"),
        ({"recompute": ()}, "recompute", "names nothing"),
        ({"offload": ("norm",)}, "offload", "norm is computed again by recompute=selective"),
        ({"recompute": "none", "offload": ("mlp",)}, "offload", "keeps all without"),
        ({"recompute": "none", "recompute_layers": 2}, "recompute_layers", "2 with recompute=none"),
        ({"recompute_layers": 0}, "recompute_layers", "0 with recompute=selective"),
        ({"recompute_together": 2}, "recompute_together", "2 with recompute=selective"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], where: str, what: str):
    found = {problem.where: problem.what for problem in replace(llama(repeats=4), **changes).problems()}
    assert list(found) == [where] and what in found[where]
