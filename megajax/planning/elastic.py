"""Enumerates layouts for a number of devices that keep the rows of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import gcd, log, log2
from typing import Any

from megajax.config.errors import Problem
from megajax.config.hints import divisors_of
from megajax.layers.facts import HasExperts
from megajax.mesh.config import SIZED_AXES, ParallelConfig
from megajax.planning.choice import problems
from megajax.training.check_row_balance import weighs_by_microbatch, written_blocks
from megajax.training.run_config import RunConfig

MAX_AXIS_SIZE = 512
"""Limit of the size of an axis, unless the config's is larger: it bounds the time of the search."""

MODEL_AXES = tuple(axis for axis in SIZED_AXES if axis != "data")
SHARDINGS = ("replicate", "zero1", "fsdp")
"""Values of parallel.data_sharding, least sharded first."""

RESHAPED = 0.8
"""Factor on the score of a candidate for each changed axis other than data: it must use a quarter more devices."""
HALVED = 0.95
"""Factor on the score for each halving of the rows in a microbatch."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that may fit."""

    cfg: RunConfig
    used: int
    """Devices of the mesh."""
    microbatches: int
    """Microbatches of a step of the last batch size."""

    def problems(self) -> list[Problem]:
        """Errors of the layout on its devices."""
        return problems(self.cfg, self.used)


def fixed_micro_size(cfg: RunConfig) -> str:
    """The setting that makes the losses depend on batch.micro_size; "" if there is none."""
    if cfg.batch.loss_average == "microbatches":
        return "batch.loss_average=microbatches"
    if weighs_by_microbatch(cfg.model):
        return "model.prediction.reweighted=microbatches"
    return "data.loader.cyclic" if cfg.data.loader.cyclic is not None else ""


def has_experts(model: Any) -> bool:
    """Whether parallel.expert shards weights; otherwise it shards rows, like data."""
    parts = (part for _, block in written_blocks(model) for part in block.parts().values())
    return any(isinstance(part, HasExperts) for part in parts)


def candidates(cfg: RunConfig, per_process: Sequence[int]) -> Iterator[Candidate]:
    """All layouts with the rows per step of cfg on at most these devices, best first; most do not fit the model.

    per_process: devices of each process; every process uses at least one. A layout is better if, in this order,

    1. no device holds more of the weights or activations than in the layout of cfg, which may need all of its memory.
       Fewer devices of `data` are not penalized.
    2. each group of a larger `tensor` is within one process.
    3. more devices work. Devices that wait in a longer pipeline count in part; the score is lower if an axis other than
       `data` changes, or if microbatches get smaller.
    4. fewer settings change, microbatches stay larger, and axis sizes stay closer to those of cfg.
    """
    search = _Search(cfg, tuple(per_process))
    for sizes in sorted(search.sizes(), key=search.rank):
        yield from search.variants(sizes)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Axis sizes, rows of a microbatch and data sharding, which determine the rank of a candidate."""

    pipeline: int
    data: int
    expert: int
    context: int
    tensor: int
    micro_size: int
    sharding: str

    def model_axes(self) -> tuple[int, ...]:
        """Sizes of `MODEL_AXES`."""
        return self.pipeline, self.expert, self.context, self.tensor

    def used(self) -> int:
        return self.pipeline * self.data * self.expert * self.context * self.tensor


class _Search:
    """The search for candidates of a config."""

    def __init__(self, cfg: RunConfig, per_process: tuple[int, ...]):
        self.cfg, self.per_process, self.devices = cfg, per_process, sum(per_process)
        self.experts = has_experts(cfg.model)
        self.common = gcd(*rows) if (rows := self._rows()) else None
        """Rows that must be divisible by micro_size x replicas; None: no limit, because batch.decrease rounds down."""
        fixed = fixed_micro_size(cfg)
        below = [size for size in range(cfg.batch.micro_size, 0, -1) if not cfg.batch.global_size % size]
        self.micro_sizes = [cfg.batch.micro_size] if fixed else [*dict.fromkeys([cfg.batch.micro_size, *below])]
        parallel = cfg.parallel
        cyclic = cfg.data.loader.cyclic is not None and parallel.data is not None
        self.replicas = parallel.replicas(1) if cyclic else None
        """Required number of data-parallel devices; None: any number."""

    def _rows(self) -> list[int]:
        """Rows of a step for all batch sizes of the run; [] if they depend on the devices."""
        batch, parallel = self.cfg.batch, self.cfg.parallel
        ramp = ((0, batch.global_size),) if batch.ramp is None else batch.ramp.thresholds(batch.global_size, 1)
        nominal = [rows for _, rows in ramp]
        if not batch.decrease:
            return nominal
        unit = batch.micro_size * parallel.expert * (parallel.data or 0)
        return [rows // unit * unit for rows in nominal] if unit else []

    def sizes(self) -> Iterator[_Sizes]:
        """All sizes that divide the rows and use at least one device of each process."""
        lengths = {axis: self._lengths(axis) for axis in MODEL_AXES}
        least, sharding = len(self.per_process), self.cfg.parallel.data_sharding
        shardings = SHARDINGS[: SHARDINGS.index(sharding) + 1]
        for pipeline, expert, context, tensor in product(*lengths.values()):
            model_size = pipeline * expert * context * tensor
            if model_size > self.devices:
                continue
            for micro_size in self.micro_sizes:
                for data in self._data(expert, micro_size, self.devices // model_size):
                    if data * model_size >= least:
                        for data_sharding in shardings:
                            yield _Sizes(pipeline, data, expert, context, tensor, micro_size, data_sharding)

    def _data(self, expert: int, micro_size: int, most: int) -> Iterator[int]:
        """Sizes of the data axis that keep the rows of every step."""
        unit = micro_size * expert
        if self.common is None:
            sizes = list(range(1, min(most, MAX_AXIS_SIZE) + 1))
        else:
            sizes = [] if self.common % unit else [size for size in divisors_of(self.common // unit) if size <= most]
        return (size for size in sizes if self.replicas in (None, size * expert))

    def _lengths(self, axis: str) -> list[int]:
        """Sizes of an axis that fit the model if all other axes are 1."""
        now = getattr(self.cfg.parallel, axis)
        if axis == "expert" and not self.experts:
            return sorted({1, now})
        sizes_of_one = dict.fromkeys(MODEL_AXES, 1)
        return [
            size
            for size in range(1, min(self.devices, max(MAX_AXIS_SIZE, now)) + 1)
            if size in (1, now) or self._possible(sizes_of_one | {axis: size})
        ]

    def _possible(self, model_axes: dict[str, int]) -> bool:
        for micro_size in self.micro_sizes:
            for sharding in ("replicate", self.cfg.parallel.data_sharding):
                sizes = _Sizes(**model_axes, data=1, micro_size=micro_size, sharding=sharding)
                if any(not candidate.problems() for candidate in self.variants(sizes)):
                    return True
        return False

    def rank(self, sizes: _Sizes) -> tuple[Any, ...]:
        """Sort key; lower is better."""
        now = self.cfg.parallel
        axes = [(size, getattr(now, axis)) for axis, size in zip(MODEL_AXES, sizes.model_axes(), strict=True)]
        changed = sum(size != before for size, before in axes) + (sizes.sharding != now.data_sharding)
        distance = sum(abs(log(size / before)) for size, before in axes)
        score = self._working_devices(sizes) * RESHAPED**changed
        score *= HALVED ** log2(self.cfg.batch.micro_size / sizes.micro_size)
        return (
            round(self._excess_memory(sizes), 6),
            self._tensor_crosses_processes(sizes),
            -round(score, 6),
            changed,
            -sizes.micro_size,
            round(distance, 6),
            *(-size for size in sizes.model_axes()[::-1]),
        )

    def _tensor_crosses_processes(self, sizes: _Sizes) -> bool:
        """Whether a group of a larger `tensor` spans processes, which may be on different machines."""
        tensor = sizes.tensor
        within_processes = sum(count // tensor for count in self.per_process) * tensor
        return tensor > self.cfg.parallel.tensor and within_processes < sizes.used()

    def _excess_memory(self, sizes: _Sizes) -> float:
        """0 if no device holds more than in the config's layout, ignoring the size of `data`; 0.5: twice as much.

        Compares dense weights, expert weights, activations of a microbatch, and data_sharding.
        """
        now = self.cfg.parallel
        weights = sizes.pipeline * sizes.tensor / (now.pipeline * now.tensor)
        experts = weights * sizes.expert / now.expert if self.experts else weights
        activations = sizes.context * sizes.tensor / (now.context * now.tensor)
        activations *= self.cfg.batch.micro_size / sizes.micro_size
        fewer_levels = SHARDINGS.index(now.data_sharding) - SHARDINGS.index(sizes.sharding)
        return 1 - min(1.0, weights, experts, activations, 0.5**fewer_levels)

    def _working_devices(self, sizes: _Sizes) -> float:
        """Devices, reduced by the additional bubble of a pipeline longer than the config's."""
        now = self.cfg.parallel
        if sizes.pipeline <= now.pipeline:
            return sizes.used()
        microbatches = max(1, self.cfg.batch.global_size // (sizes.micro_size * sizes.data * sizes.expert))
        work = microbatches * now.virtual_stages
        return sizes.used() * (work + now.pipeline - 1) / (work + sizes.pipeline - 1)

    def variants(self, sizes: _Sizes) -> Iterator[Candidate]:
        """The layouts with these sizes, those with the fewest other changes first."""
        now, batch = self.cfg.parallel, replace(self.cfg.batch, micro_size=sizes.micro_size)
        used = sizes.used()
        axes = {axis.name: getattr(sizes, axis.name) for axis in fields(sizes) if axis.name in SIZED_AXES}
        # data=None uses all devices.
        axes["data"] = None if now.data is None and used == self.devices else sizes.data
        microbatches = max(1, batch.global_size // (batch.micro_size * sizes.data * sizes.expert))
        for changes in _dependent(now, sizes):
            parallel = replace(now, **axes, data_sharding=sizes.sharding, **changes)
            yield Candidate(self.cfg.but(parallel=parallel, batch=batch), used, microbatches)


def _dependent(now: ParallelConfig, sizes: _Sizes) -> Iterator[dict[str, Any]]:
    """Values of the settings that depend on axis sizes, the config's own first where they still fit."""
    virtual = [now.virtual_stages] if sizes.pipeline == now.pipeline else []
    virtual += [] if sizes.pipeline == 1 else divisors_of(now.virtual_stages)[::-1]
    rounds = [now.context_rounds] if sizes.context in (1, now.context) else []
    rounds += [] if sizes.context == 1 else divisors_of(now.context_rounds)[::-1]
    shards = now.shards if now.shards and sizes.data % now.shards == 0 and sizes.sharding != "replicate" else None
    heads = now.context_heads
    if sizes.context != now.context and sizes.context % heads:
        heads = max(size for size in divisors_of(sizes.context) if size <= heads)
    for stages, context_rounds in product(dict.fromkeys([*virtual, 1]), dict.fromkeys([*rounds, 1])):
        chunks = sizes.pipeline * stages
        yield {
            "virtual_stages": stages,
            "schedule": "1f1b" if now.schedule == "interleaved" and stages == 1 else now.schedule,
            "layers": now.layers if chunks == now.chunks() else None,
            "context_rounds": context_rounds,
            "context_heads": heads,
            "shards": shards,
            "sequence": now.sequence and sizes.tensor > 1,
        }
