"""Train steps compiled for 8 virtual H100s if the extra aot is installed: memory traffic, and what schedules expose."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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


@pytest.fixture(scope="module", params=["gpt", "llama"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield compiled(request.param)


@cache
def compiled(name: str) -> Case:
    config, settings = {"gpt": ("gpt3.py:gpt3_1_3b", ()), "llama": ("llama3.py", TENSOR_4)}[name]
    plan = planned(config, *settings)
    return Case(plan, audit(plan.text))


def planned(config: str, *settings: str) -> TrainPlan:
    """The step for eight H100s."""
    with pytest.MonkeyPatch.context() as patch:
        # `prepare` sets variables that other tests must not inherit.
        for variable in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
            patch.setenv(variable, "")
        prepare()
        cluster, _ = read_cluster("h100:8")
        assert cluster is not None
        cfg: Any = load(config, *settings)
        return compile_train_step(cfg, cluster)


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


def test_no_scores_are_written_to_memory(case: Case) -> None:
    heads, rows = case.model.stack.pattern[0].mixer.heads // case.tensor, case.plan.cfg.batch.micro_size
    scores = 2 * rows * heads * case.model.sequence_length**2
    assert max(op.bytes_written for op in case.in_layers()) < scores


def test_layers_copy_only_these_activations(case: Case) -> None:
    """Rows of stacked weights, gradients and kept tensors go in and out of the stacks. All else is listed here."""
    stacks = {"dynamic-slice", "dynamic-update-slice"}
    moves = [op for op in case.in_layers() if op.work == "move" and op.bytes_written >= MIB and not op.opcodes & stacks]
    written: dict[str, int] = {}
    for op in moves:
        (opcode,) = op.opcodes - {"broadcast"}
        written[opcode] = written.get(opcode, 0) + op.bytes_written
    mixer = case.model.stack.pattern[0].mixer
    one_head = 2 * case.tokens * mixer.size(case.model.hidden)
    heads, groups = mixer.heads // case.tensor, mixer.groups() // case.tensor
    if case.plan.cfg.parallel.sequence:
        # Llama: the residual stream, while the collective beside it runs. Its values are a slice of the one product
        # that XLA makes of those of queries, keys and values.
        assert written == {
            "copy": 2 * case.residual,
            "slice": groups * one_head,
            "concatenate": (heads + 2 * groups) * one_head,
        }
    else:
        # GPT: cuBLAS overwrites the residual stream that it adds to, after attention and after the MLP, and the loop
        # over layers has a buffer of its own. Gradients of keys and values are joined for one product.
        assert written == {"copy": 3 * 2 * case.residual, "concatenate": 2 * groups * one_head}


def test_layers_write_only_these_float32_activations(case: Case) -> None:
    """Gradients of weights are float32 as well; the leading dimensions of activations are tokens."""
    tokens = {case.tokens, case.residual // case.model.hidden}

    def wide(op: CompiledKernel) -> list[tuple[int, ...]]:
        shapes = [tuple(map(int, text.split(","))) for text in re.findall(r"f32\[([\d,]+)\]", op.shape)]
        return [
            shape
            for shape in shapes
            if prod(shape) >= case.residual // 2 and tokens & {prod(shape[:n]) for n in range(1, len(shape))}
        ]

    kernels = [op for op in case.in_layers() if wide(op) and op.work != "attention" and not op.place.conditional]
    # With sequence parallelism each of the two RMSNorms writes the sum for its gain's gradient: the compiler
    # prefers to share the read with two other results.
    assert len(kernels) == (2 if case.plan.cfg.parallel.sequence else 0)
    assert all(("f32", case.residual) in arrays(op.shape) and len(arrays(op.shape)) == 3 for op in kernels)


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


def test_gathers_of_fsdp_are_hidden() -> None:
    """What a schedule by costs exposes of a step: see docs/compiler.md."""
    settings = ("batch.global_size=64", "model.recompute=selective", "batch.micro_size=1")
    scheduled = planned("llama3.py", *settings).scheduled
    assert scheduled is not None and scheduled.takes_costs and scheduled.matched > 0.95
    assert scheduled.default.exposed_seconds == pytest.approx(0.41, rel=0.1)
    assert scheduled.by_costs.exposed_seconds == pytest.approx(0.13, rel=0.1)


def test_two_microbatches_hide_the_collectives_of_each_other() -> None:
    settings = ("batch.global_size=64", *TENSOR_4, "batch.side_by_side=2")
    scheduled = planned("llama3.py", *settings).scheduled
    assert scheduled is not None and scheduled.takes_costs
    # One at a time, 1.37 s by XLA's own times and 1.03 s by costs.
    assert scheduled.default.exposed_seconds == pytest.approx(0.95, rel=0.1)
    assert scheduled.by_costs.exposed_seconds == pytest.approx(0.32, rel=0.1)
