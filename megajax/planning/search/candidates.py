"""A config on a cluster, and the layouts a search chooses among: a Choice of settings, and every combination of them.

`apply` puts a Choice into a config; the config's own rules then say whether it is valid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import megajax.config.schema as schema
from megajax.config.dump import flatten
from megajax.config.errors import Problem
from megajax.layers.remat import Recompute, Recomputing, words
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig
from megajax.models.facts import Facts, demand_facts
from megajax.optim.config import AdamWConfig
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Estimate, estimate
from megajax.planning.program.devices import Cluster
from megajax.training.config import BatchConfig
from megajax.training.run_config import RunConfig

MAX_TOKENS = 65_536
"""Tokens of a microbatch, unless a single row has more: matmuls reach their full rate long before."""

PARTIAL: tuple[Recompute, ...] = (
    ("activation",),
    ("norm", "activation"),
    "selective",
    ("norm", "latent", "activation", "mlp"),
    ("norm", "latent", "activation", "query_key_value"),
    ("norm", "latent", "activation", "mlp", "query_key_value"),
    ("norm", "latent", "activation", "mlp", "query_key_value", "core_attention"),
)
"""Recompute policies between none and full, cheapest first."""


@dataclass(frozen=True)
class Case:
    """A config on a cluster."""

    cfg: RunConfig
    cluster: Cluster
    device: Device
    """Constants of the cluster's devices."""

    @cached_property
    def described(self) -> Description:
        return describe(self.cfg, self.device, self.cluster.devices, self.cluster.per_node)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.described)


type Sharding = Literal["replicate", "zero1", "fsdp"]
SHARDINGS: tuple[Sharding, ...] = ("zero1", "fsdp", "replicate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a search sets, by the names of `SEARCHED`."""

    tensor: int
    pipeline: int
    virtual_stages: int
    data: int
    data_sharding: Sharding
    sequence: bool
    micro_size: int
    recompute: Recompute = "selective"
    recompute_layers: int | None = None
    offload: float = 0.0

    @property
    def layout(self) -> str:
        """Such as "tensor 4, pipeline 4 x 5, data 4"."""
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}{chunks}, data {self.data}"

    @property
    def recomputing(self) -> str:
        """Such as "full, 3 layers"."""
        some = "" if self.recompute_layers is None else f", {self.recompute_layers} layers"
        return words(self.recompute) + some

    @property
    def details(self) -> str:
        """What `layout` does not say: "zero1, 2 rows, recompute full"."""
        rows = f"{self.micro_size} row{'s' * (self.micro_size > 1)}"
        away = f", {self.offload:.0%} of moments in host memory" if self.offload else ""
        return f"{self.data_sharding}, {rows}, recompute {self.recomputing}{away}"

    @property
    def kind(self) -> tuple:
        """Everything but the recompute policy: layouts of one kind appear once in a ranking."""
        return self.tensor, self.pipeline, self.virtual_stages, self.data_sharding, self.micro_size, self.sequence

    @classmethod
    def of(cls, cfg: RunConfig, devices: int) -> "Choice":
        """The settings that a config has. Raises UserError for a model without facts."""
        parallel, recomputing = cfg.parallel, demand_facts(cfg.model).recomputing()
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_stages=parallel.virtual_stages,
            data=parallel.data_size(devices),
            data_sharding=parallel.data_sharding,
            sequence=parallel.sequence,
            micro_size=cfg.batch.micro_size,
            recompute=recomputing.recompute,
            recompute_layers=recomputing.layers,
            offload=cfg.optimizer.offload,
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Choice":
        """From JSON of `plain`."""
        again = written["recompute"]
        fields: dict[str, Any] = {**written, "recompute": tuple(again) if isinstance(again, list) else again}
        return cls(**fields)


_PARALLEL = ("tensor", "pipeline", "virtual_stages", "data", "data_sharding", "sequence")
SEARCHED: Mapping[str, str] = MappingProxyType(
    {f"parallel.{name}": name for name in _PARALLEL}
    | {
        "batch.micro_size": "micro_size",
        "model.recompute": "recompute",
        "model.recompute_layers": "recompute_layers",
        "optimizer.offload": "offload",
    }
)
"""Settings that a search chooses -> their names in a Choice."""

_OWNERS = {"parallel": ParallelConfig, "batch": BatchConfig, "model": DecoderConfig, "optimizer": AdamWConfig}


def annotation(name: str) -> Any:
    """Type of a searched setting, by its dotted name."""
    owner, _, setting = name.partition(".")
    return schema.hints(_OWNERS[owner])[setting]


def apply(choice: Choice, cfg: RunConfig) -> RunConfig:
    """The config with a choice in it, without settings that belong to its previous layout only."""
    old, model = cfg.parallel, demand_facts(cfg.model)
    chunks = choice.pipeline * choice.virtual_stages
    schedule = old.schedule
    if choice.virtual_stages > 1 or schedule == "interleaved":
        schedule = "interleaved" if choice.virtual_stages > 1 else "1f1b"
    parallel = replace(
        old,
        **{name: getattr(choice, name) for name in _PARALLEL},
        schedule=schedule,
        layers=old.layers if chunks == old.chunks() and choice.pipeline == old.pipeline else None,
    )
    before = model.recomputing()
    recomputing = Recomputing(
        recompute=choice.recompute,
        layers=choice.recompute_layers,
        layers_per_checkpoint=before.layers_per_checkpoint if choice.recompute == "full" else 1,
    )
    again = recomputing.again()
    offload = () if choice.recompute == "none" else tuple(part for part in before.offload if part not in again)
    return cfg.but(
        parallel=parallel,
        model=model.with_recomputing(replace(recomputing, offload=offload)),
        batch=replace(cfg.batch, micro_size=choice.micro_size),
        # Every config is a dataclass, which its Protocol cannot say.
        optimizer=replace(cfg.optimizer, offload=choice.offload),  # ty: ignore[invalid-argument-type]
    )


def problems(cfg: RunConfig, devices: int) -> list[Problem]:
    """Problems of a config with a choice in it; only the parts that a choice changes are checked."""
    parallel = [Problem(f"parallel.{one.where}", one.what, one.hint) for one in cfg.parallel.problems()]
    model = [Problem(f"model.{one.where}", one.what, one.hint) for one in cfg.model.problems()]
    return parallel or model or cfg.problems(devices)


def settings(old: RunConfig, new: RunConfig) -> list[str]:
    """The settings that turn `old` into `new`, as "parallel.tensor=4"."""
    before, after = flatten(old), flatten(new)
    return [f"{name}={_text(value)}" for name, value in after.items() if name not in before or before[name] != value]


def _text(value: Any) -> str:
    """A plain value as it is written on a command line."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list():
            return ",".join(map(_text, value))
    return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """All layouts of a config on a cluster."""

    cfg: RunConfig
    devices: int
    per_node: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a Choice that the user has given."""

    @property
    def model(self) -> Facts:
        """Raises UserError for a model without facts."""
        return demand_facts(self.cfg.model)

    def given(self) -> Choice:
        """The config as it is, with what is fixed."""
        now = replace(Choice.of(self.cfg, self.devices), **self.fixed)
        rest = max(1, self.devices // (now.tensor * now.pipeline))
        return now if "data" in self.fixed or self.cfg.parallel.data is not None else replace(now, data=rest)

    def groups(self) -> list[tuple[int, int, int]]:
        """(tensor, pipeline, data) that use all devices, or as many as a fixed `data` leaves."""
        places = []
        for tensor in self._given("tensor") or divisors(self.devices, self.per_node):
            repeats = self.cfg.model.stack.repeats
            for pipeline in self._given("pipeline") or divisors(self.devices // tensor, repeats):
                rest, over = divmod(self.devices, tensor * pipeline)
                places += [(tensor, pipeline, data) for data in self._given("data") or [rest] * (rest and not over)]
        return places

    def layouts(self, group: tuple[int, int, int]) -> Iterator[Choice]:
        """All layouts of a group, each with the recompute policy that takes least memory."""
        tensor, pipeline, data = group
        for sharding, sequence, chunks, micro_size in product(
            self._given("data_sharding") or self._shardings(data),
            self._given("sequence") or ([True, False] if tensor > 1 else [False]),
            self._given("virtual_stages") or self._chunks(pipeline),
            self._given("micro_size") or self._micro_sizes(data),
        ):
            yield Choice(
                tensor=tensor,
                pipeline=pipeline,
                virtual_stages=chunks,
                data=data,
                data_sharding=sharding,
                sequence=sequence,
                micro_size=micro_size,
                recompute=self.recomputes()[-1],
                recompute_layers=self.fixed.get("recompute_layers"),
                offload=self.fixed.get("offload", 0.0),
            )

    def recomputes(self) -> list[Recompute]:
        """Recompute policies, least recomputing first; those with latents only for models that have any."""
        if "recompute" in self.fixed:
            return [self.fixed["recompute"]]
        latents = any("latent" in block.tensors(self.model.hidden) for block in self.model.stack.pattern)
        policies: dict[Recompute, None] = {"none": None}
        for parts in PARTIAL:
            if not latents and not isinstance(parts, str):
                # Without latents, these two parts are what "selective" recomputes.
                parts = "selective" if parts == ("norm", "activation") else tuple(p for p in parts if p != "latent")
            policies[parts] = None
        return [*policies, "full"]

    def _given(self, name: str) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else []

    def _shardings(self, data: int) -> tuple[Sharding, ...]:
        """All, or one of them where `data` is 1 and they are equal."""
        mine = self.cfg.parallel.data_sharding
        return SHARDINGS if data > 1 else (mine if mine != "fsdp" else "zero1",)

    def _chunks(self, pipeline: int) -> list[int]:
        """Numbers of virtual stages that give chunks of different sizes; of equal ones, the smallest number."""
        if pipeline == 1 or self.cfg.parallel.schedule == "gpipe":
            return [1]
        repeats = self.cfg.model.stack.repeats
        fewest: dict[int, int] = {}
        for chunks in range(1, repeats // pipeline + 1):
            fewest.setdefault(-(-repeats // (pipeline * chunks)), chunks)
        return list(fewest.values())

    def _micro_sizes(self, data: int) -> list[int]:
        rows = max(1, self.cfg.batch.global_size // data)
        return divisors(rows, max(1, self.cfg.batch.micro_size, MAX_TOKENS // self.model.sequence_length))


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to `most`, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
