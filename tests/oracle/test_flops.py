"""Floating-point operations of a step against the count of Megatron-LM's throughput line."""

import pytest
from megatron_cases import Comparison, cases, load_json, unsupported
from megatron_config import flag_config

from megajax.models.flops import flops_per_token

TOLERANCE = 1e-9

CASES = load_json("flops/flops_memory.json")


@pytest.mark.parametrize("case", cases(CASES))
def test_operations(case: str) -> None:
    """Of a global batch, of one row, and of packed rows, whose core attention goes by the sum of squared lengths."""
    theirs = CASES[case]
    cfg = flag_config(
        theirs["cli"],
        padded_vocabulary=theirs["padded_vocab_size"],
        ffn=theirs["ffn_hidden_size"],
        head_dim=theirs["kv_channels"],
    )
    assert not cfg.problems()
    each, compare = flops_per_token(cfg), Comparison(case)
    for rows, name in ((theirs["global_batch_size"], ""), (1, "_batch1")):
        stored = theirs[f"num_floating_point_operations{name}"]
        compare.check("operations", each.causal * cfg.sequence_length * rows, stored, TOLERANCE, name=f"of {rows} rows")
    packed = theirs.get("flops_packed_example")
    if packed:
        # The causal half of core attention is what the two counts differ by.
        core = (each.full - each.causal) / cfg.sequence_length
        found = (2 * each.causal - each.full) * packed["total_real_tokens"] + core * packed["seqlen_squared_sum"]
        compare.check("operations", found, packed["value"], TOLERANCE, name="of packed rows")
    compare.finish()


@pytest.mark.parametrize("case", cases(CASES))
def test_memory(case: str) -> None:
    unsupported("theoretical memory report")
