"""FLOPs of a step, and memory by formula, against Megatron-LM's count and report."""

import shlex
from dataclasses import replace
from typing import Any

import pytest
from megatron_cases import Comparison, cases, load_json

from megajax.interop.megatron.flags.translate import convert
from megajax.layers.moe.config import MoEConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.memory import MemorySetting, activation_bytes, memory_report
from megajax.training.run_config import RunConfig

TOLERANCE = 1e-9
MB = 2**20

CASES = load_json("flops/flops_memory.json")


NUMBERS = "--make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --mock-data --train-iters 1 --lr 1e-4"


def run_of(theirs: dict[str, Any]) -> RunConfig:
    """The run of a case's command line."""
    # Their null tokenizer adds a token.
    line = f"{theirs['cli']} --vocab-size {theirs['padded_vocab_size'] - 1} {NUMBERS}"
    cfg = convert(shlex.split(line)).config
    assert cfg is not None and cfg.model.vocabulary_size == theirs["padded_vocab_size"]
    return cfg


@pytest.mark.parametrize("case", cases(CASES))
def test_operations(case: str) -> None:
    """The counts are of a global batch, one row, and packed rows, where core attention goes by squared lengths."""
    theirs = CASES[case]
    cfg = run_of(theirs).model
    each, compare = cfg.flops(), Comparison(case)
    for rows, name in ((theirs["global_batch_size"], ""), (1, "_batch1")):
        actual, stored = each.megatron * cfg.sequence_length * rows, theirs.get(f"num_floating_point_operations{name}")
        if stored is not None:
            compare.check("operations", actual, stored, TOLERANCE, name=f"of {rows} rows")
    packed = theirs.get("flops_packed_example")
    if packed:
        # Rows of twice the length differ by core attention.
        core = replace(cfg, sequence_length=2 * cfg.sequence_length).flops().megatron - each.megatron
        actual = (each.megatron - core) * packed["total_real_tokens"]
        actual += core / cfg.sequence_length * packed["seqlen_squared_sum"]
        compare.check("operations", actual, packed["value"], TOLERANCE, name="of packed rows")
    compare.finish()


def without_experts(cfg: DecoderConfig, ffn: int) -> DecoderConfig:
    """The model whose activations they count: each layer with the feed-forward layer of those without experts."""
    blocks = [
        replace(block, mlp=replace(block.mlp.expert, ffn=ffn)) if isinstance(block.mlp, MoEConfig) else block
        for block in cfg.stack.pattern
    ]
    return replace(cfg, stack=cfg.stack.with_pattern(blocks))


WITH_MEMORY = [case for case, theirs in CASES.items() if theirs.get("report_theoretical_memory_MB")]
"""Megatron-LM reports no memory of hybrids."""


@pytest.mark.parametrize("case", cases(WITH_MEMORY))
def test_memory(case: str) -> None:
    """The report with the step's microbatches and without, and its two formulas for activations."""
    theirs, compare = CASES[case], Comparison(case)
    run = run_of(theirs)
    stored = theirs["report_theoretical_memory_MB"]
    counts = {"microbatches": stored["num_microbatches"], "data": theirs["data_parallel_size"]}
    setting = MemorySetting.of(run.parallel, run.model.recompute, micro_size=run.batch.micro_size, **counts)
    actual, dense = memory_report(run.model, setting), without_experts(run.model, theirs["ffn_hidden_size"])
    if "weight_and_optimizer_bytes" in theirs:
        compare.check("memory", actual.weights, theirs["weight_and_optimizer_bytes"], TOLERANCE, name="of weights")
    expected = stored["weight_optimizer"], stored["activation"], stored["total"]
    for one, other, name in (
        (setting, expected, "in all"),
        (replace(setting, microbatches=None), theirs.get("report_num_microbatches_None_MB"), "full"),
    ):
        weights, activations = memory_report(run.model, one).weights / MB, memory_report(dense, one).activations / MB
        if other is not None:
            compare.check("memory", [weights, activations, weights + activations], other, TOLERANCE, name=name)
    for sequence, name in ((True, "sp"), (False, "without_sp")):
        (section,), head = dense.section_facts(), dense.head_facts()
        value = activation_bytes(section, head.columns, replace(setting, sequence=sequence))
        if (bytes_of := theirs.get(f"activation_bytes_{name}_formula")) is not None:
            compare.check("memory", value, bytes_of, TOLERANCE, name=name)
    said = {line.partition(" in billions: ")[0]: line.rpartition(" ")[2] for line in theirs.get("verbose_stdout", ())}
    whole, shard = (
        said.get(name) for name in ("Total number of parameters", "Number of parameters in most loaded shard")
    )
    if whole is not None:
        parameters = actual.layer_parameters + actual.embedding_parameters
        compare.check("parameters", parameters / 1e9, float(whole), 0.0051, scale=1.0)
    if shard is not None:
        compare.check("parameters", actual.most_loaded / 1e9, float(shard), 0.000051, scale=1.0)
    compare.finish()
