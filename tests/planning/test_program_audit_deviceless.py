"""Train steps compiled for 8 virtual H100s if the extra aot is installed: memory traffic, and what schedules expose."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
from descriptions import TENSOR_4

from megajax.config import load
from megajax.models.decoder.config import DecoderConfig
from megajax.planning.compiled.audit import Audit, CompiledKernel, audit
from megajax.planning.compiled.devices import prepare, read_cluster
from megajax.planning.compiled.hlo import arrays
from megajax.planning.train_step import TrainPlan, compile_train_step

MIB = 2**20
COUNTERS = 28
"""Bytes of a state except weights and optimizer: seven numbers."""


pytestmark = [pytest.mark.slow, pytest.mark.aot]


@dataclass(frozen=True)
class Case:
    """One program."""

    plan: TrainPlan
    found: Audit

    @property
    def model(self) -> DecoderConfig:
        return self.plan.cfg.model

    @property
    def tensor(self) -> int:
        return self.plan.mesh["tensor"]

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a device."""
        return self.plan.cfg.batch.micro_size * self.model.sequence_length

    @property
    def residual(self) -> int:
        """Elements of an activation between layers, on one device."""
        return self.tokens * self.model.hidden // (self.tensor if self.plan.cfg.parallel.sequence else 1)

    @property
    def runs(self) -> int:
        """How often one layer runs in one direction, per step."""
        return self.model.stack.layers() * self.plan.microbatches

    def in_layers(self) -> list[CompiledKernel]:
        """Kernels in the loops over layers: those loops that contain attention."""
        loops = {op.place.path for op in self.found.kernels if op.work == "attention"}
        assert len(loops) == 2  # forward and backward
        return [op for op in self.found.kernels if op.place.path in loops]

    def in_microbatches(self) -> list[CompiledKernel]:
        """Kernels that run once a microbatch, outside of inner loops."""
        return [op for op in self.found.kernels if len(op.place.path) == 1]


@pytest.fixture(scope="module")
def case() -> Case:
    """The step of Llama-3 8B for eight H100s."""
    with pytest.MonkeyPatch.context() as patch:
        # `prepare` sets variables that other tests must not inherit.
        for variable in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
            patch.setenv(variable, "")
        prepare()
        cluster, _ = read_cluster("h100:8")
        assert cluster is not None
        cfg: Any = load("llama3.py", *TENSOR_4)
        plan = compile_train_step(cfg, cluster)
    return Case(plan, audit(plan.text))


def calls(case: Case) -> list[CompiledKernel]:
    """The calls of cuDNN's attention."""
    return [op for op in case.found.kernels if "fmha" in (op.target or "")]


def test_attention_is_one_cudnn_call_per_layer_and_direction(case: Case) -> None:
    forward = [op for op in calls(case) if not op.target.endswith("Backward")]
    backward = [op for op in calls(case) if op.target.endswith("Backward")]
    assert sum(op.place.runs() for op in forward) == sum(op.place.runs() for op in backward) == case.runs
    # Rows with more documents than cuDNN's layout take the other branch: docs/attention.md.
    rest = [op for op in case.found.kernels if op.work == "attention" and "fmha" not in (op.target or "")]
    isolated = "segment_ids" in case.plan.cfg.data.leaves()
    assert bool(rest) == isolated and all(op.place.conditional == isolated for op in [*rest, *forward])


def test_logits_exist_for_one_chunk_only(case: Case) -> None:
    vocabulary = case.model.padded_vocabulary() // case.tensor
    legal = max(case.model.loss_chunk, case.model.hidden)
    written = {text for op in case.found.kernels for text in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", op.shape)}
    of_logits = [shape for shape in (tuple(map(int, text.split(","))) for text in written) if vocabulary in shape]
    assert (case.model.loss_chunk, vocabulary) in of_logits
    assert max(prod(shape) for shape in of_logits) <= legal * vocabulary


def test_the_whole_state_is_updated_in_place(case: Case) -> None:
    memory = case.plan.memory
    assert memory.aliased == memory.parameters + memory.optimizer + COUNTERS
    assert memory.outputs - memory.aliased < 1024


def test_weights_are_cast_once_a_step(case: Case) -> None:
    casts = [op for op in case.found.kernels if op.work == "cast" and op.bytes_written >= MIB]
    assert casts and not [op for op in casts if op.place.path]
    vectors = 4 * case.model.stack.layers() * case.model.hidden * 4
    cast = sum(n for op in casts for kind, n in arrays(op.shape) if kind == "bf16")
    assert abs(cast * 4 - case.plan.memory.parameters) < vectors + case.plan.memory.parameters // 100


def test_accumulators_are_updated_in_place(case: Case) -> None:
    """A microbatch copies nothing in float32 except the zeros that the table's gradients start from."""
    table = case.model.padded_vocabulary() // case.tensor * case.model.hidden
    copies = [
        op
        for op in case.in_microbatches()
        if op.work == "move" and any(kind == "f32" and n >= case.residual for kind, n in arrays(op.shape))
    ]
    assert len(copies) <= 1 and all(arrays(op.shape) == [("f32", table)] for op in copies)


def test_the_optimizer_reads_each_weight_twice(case: Case) -> None:
    """Once for the norm of all gradients, once for the update: one kernel writes the weight and two moments."""
    outside = [op for op in case.found.kernels if not op.place.path and op.work == "compute"]
    large = [op for op in outside if op.bytes_read >= 16 * MIB]
    updates = [op for op in large if [kind for kind, _ in arrays(op.shape)] == ["f32"] * 3]
    norms = [op for op in large if op.bytes_written < MIB]
    state = case.plan.memory.parameters + case.plan.memory.optimizer
    assert abs(sum(op.bytes_written for op in updates) - state) < state // 50
    assert abs(sum(op.bytes_read for op in norms) - case.plan.memory.parameters) < case.plan.memory.parameters // 50
    assert {op.name for op in large} == {op.name for op in [*updates, *norms]}
