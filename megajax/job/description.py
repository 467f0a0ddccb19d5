"""The figures of a run that its banner shows: expert layers, and the memory of activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from megajax.layers.expert_facts import ExpertFacts
from megajax.layers.facts import BlockFacts, Share
from megajax.mesh.config import SHARDS, devices_over
from megajax.models.facts import Facts, SectionFacts, block_facts
from megajax.models.memory import MemoryReport, MemorySetting, SavedBytes, memory_report, saved_bytes
from megajax.training.program import Program
from megajax.training.session import Parts


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run that follow from its parts, for the banner."""

    mixtures: Sequence[tuple[ExpertFacts, float]]
    """Distinct expert layers, each with the tokens of a microbatch on one group of `tensor` devices."""
    saved: Mapping[str, Sequence[SavedBytes]]
    """Section -> bytes that its layers save per microbatch, summed over the devices of `context` and `tensor`."""
    memory: MemoryReport | None
    """By Megatron-LM's formula; None for what the formula lacks."""


def describe(parts: Parts) -> RunFigures:
    """The figures of a run; those of a model without facts are empty."""
    program, facts = parts.program, parts.program.summary.facts
    if facts is None:
        return RunFigures((), {}, None)
    chosen = facts.with_kernels([choice.kernel for choice in parts.resolved.kernels])
    saved, mixtures = {}, []
    for section in chosen.section_facts():
        tokens = program.cfg.batch.micro_size * section.positions
        blocks = block_facts(section, section.stack.pattern, program.cfg.precision.compute)
        saved[section.path] = _saved_by_layers(program, section, blocks, tokens)
        mixtures += mixtures_of(blocks, tokens / program.mesh.shape["context"])
    distinct = [layer for number, layer in enumerate(mixtures) if layer not in mixtures[:number]]
    return RunFigures(distinct, saved, _by_formula(program, facts))


def mixtures_of(blocks: Sequence[BlockFacts], tokens: float) -> list[tuple[ExpertFacts, float]]:
    """The expert layers of blocks, each with its tokens."""
    return [(experts, tokens) for block in blocks for experts in block.experts]


def _saved_by_layers(
    program: Program, section: SectionFacts, blocks: Sequence[BlockFacts], tokens: int
) -> Sequence[SavedBytes]:
    width = jnp.dtype(program.cfg.precision.compute).itemsize
    share = Share(
        tokens=tokens,
        width=width,
        residual_width=4 if section.residual == "float32" else width,
        operand_width=None if program.cfg.precision.matmul is None else program.cfg.precision.matmul.saved_bytes,
    )
    repeats = section.stack.repeats
    if program.pipeline is not None and len(section.stack.parts()) > 1:
        longest = max(program.partition.stored(), key=len)
        blocks = blocks[longest.start : longest.stop]
    elif program.pipeline is not None:
        repeats = program.partition.rows
    return list(saved_bytes(section.recomputing, blocks, share, repeats))


def _by_formula(program: Program, facts: Facts) -> MemoryReport | None:
    sizes = program.mesh.shape
    if sizes["context"] > 1:
        return None
    setting = MemorySetting.of(
        program.cfg.parallel,
        facts.recomputing().recompute,
        data=devices_over(sizes, SHARDS),
        micro_size=program.cfg.batch.micro_size,
        microbatches=program.microbatches,
    )
    return memory_report(facts, setting)
