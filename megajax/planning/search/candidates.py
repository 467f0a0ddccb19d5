"""The layouts a search may choose among: what it may set, what of that the user has fixed, and every combination.

A `Choice` is the settings; `apply` puts one into a config, whose own rules then say whether it may be.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import megajax.config.schema as schema
from megajax.config.errors import Problem
from megajax.layers.config import LatentAttentionConfig
from megajax.layers.remat import Recompute, words
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig
from megajax.optim.config import AdamWConfig
from megajax.training.config import BatchConfig
from megajax.training.run_config import RunConfig

MOST_TOKENS = 65_536
"""Of a microbatch, unless a single row has more: matmuls have their full rate long before."""

PARTIAL: tuple[Recompute, ...] = (
    ("activation",),
    ("norm", "activation"),
    "selective",
    ("norm", "latent", "activation", "mlp"),
    ("norm", "latent", "activation", "query_key_value"),
    ("norm", "latent", "activation", "mlp", "query_key_value"),
    ("norm", "latent", "activation", "mlp", "query_key_value", "core_attention"),
)
"""Between none and full, what costs least to compute again first."""

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
        """In a word: tensor 4, pipeline 4 x 5, data 4."""
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}{chunks}, data {self.data}"

    @property
    def recomputing(self) -> str:
        """In a word: full, 3 layers."""
        some = "" if self.recompute_layers is None else f", {self.recompute_layers} layers"
        return words(self.recompute) + some

    @property
    def details(self) -> str:
        """All that `layout` does not say: zero1, 2 rows, recompute full."""
        rows = f"{self.micro_size} row{'s' * (self.micro_size > 1)}"
        away = f", {self.offload:.0%} of the moments in host memory" if self.offload else ""
        return f"{self.data_sharding}, {rows}, recompute {self.recomputing}{away}"

    @property
    def kind(self) -> tuple:
        """What tells layouts apart in a list of the best: all but how much is computed again."""
        return self.tensor, self.pipeline, self.virtual_stages, self.data_sharding, self.micro_size, self.sequence

    @classmethod
    def of(cls, cfg: RunConfig, devices: int) -> "Choice":
        """Of a config as it is."""
        parallel = cfg.parallel
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_stages=parallel.virtual_stages,
            data=parallel.data_size(devices),
            data_sharding=parallel.data_sharding,
            sequence=parallel.sequence,
            micro_size=cfg.batch.micro_size,
            recompute=cfg.model.recompute,
            recompute_layers=cfg.model.recompute_layers,
            offload=cfg.optimizer.offload,
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Choice":
        """Of `plain`, through JSON."""
        given: dict[str, Any] = dict(written)
        if isinstance(given["recompute"], list):
            given["recompute"] = tuple(given["recompute"])
        return cls(**given)


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
"""Settings of a config that a search chooses, and their names in a Choice."""

_OWNERS = {"parallel": ParallelConfig, "batch": BatchConfig, "model": DecoderConfig, "optimizer": AdamWConfig}


def annotation(name: str) -> Any:
    """Of a searched setting, by its dotted name."""
    owner, _, setting = name.partition(".")
    return schema.hints(_OWNERS[owner])[setting]


def apply(choice: Choice, cfg: RunConfig) -> RunConfig:
    """The config with a choice in it; what goes with another layout only is left out."""
    old, model = cfg.parallel, cfg.model
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
    again = replace(model.recomputing(), recompute=choice.recompute).again()
    away = () if choice.recompute == "none" else tuple(part for part in model.offload if part not in again)
    return cfg.but(
        parallel=parallel,
        model=replace(
            model,
            recompute=choice.recompute,
            recompute_layers=choice.recompute_layers,
            recompute_together=model.recompute_together if choice.recompute == "full" else 1,
            offload=away,
        ),
        batch=replace(cfg.batch, micro_size=choice.micro_size),
        optimizer=replace(cfg.optimizer, offload=choice.offload),
    )


def problems(cfg: RunConfig, devices: int) -> list[Problem]:
    """What the config's own rules say against a choice in it; only the parts a choice changes are asked."""
    found = [Problem(f"parallel.{one.where}", one.what, one.hint) for one in cfg.parallel.problems()]
    again = [Problem(f"model.{one.where}", one.what, one.hint) for one in cfg.model.problems()]
    return found or again or cfg.problems(devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Where a search looks."""

    cfg: RunConfig
    devices: int
    per_node: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a Choice that stay as they are."""

    def given(self) -> Choice:
        """The config as it is, with what is fixed."""
        now = replace(Choice.of(self.cfg, self.devices), **self.fixed)
        rest = max(1, self.devices // (now.tensor * now.pipeline))
        return now if "data" in self.fixed or self.cfg.parallel.data is not None else replace(now, data=rest)

    def groups(self) -> list[tuple[int, int, int]]:
        """(tensor, pipeline, data) that use all devices, or as many as a fixed `data` leaves."""
        found = []
        for tensor in self._given("tensor") or divisors(self.devices, self.per_node):
            repeats = self.cfg.model.stack.repeats
            for pipeline in self._given("pipeline") or divisors(self.devices // tensor, repeats):
                rest, over = divmod(self.devices, tensor * pipeline)
                found += [(tensor, pipeline, data) for data in self._given("data") or [rest] * (rest and not over)]
        return found

    def layouts(self, group: tuple[int, int, int]) -> Iterator[Choice]:
        """All of a group that differ in more than what is computed again; of that they have what takes least memory."""
        tensor, pipeline, data = group
        sequences = self._given("sequence") or ([True, False] if tensor > 1 else [False])
        for sharding in self._given("data_sharding") or self._shardings(data):
            for sequence in sequences:
                for chunks in self._given("virtual_stages") or self._chunks(pipeline):
                    for micro_size in self._given("micro_size") or self._micro_sizes(data):
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
        """What may be computed again, least first; latents only where there are any."""
        if "recompute" in self.fixed:
            return [self.fixed["recompute"]]
        latents = any(isinstance(block.mixer, LatentAttentionConfig) for block in self.cfg.model.stack.pattern)
        found: dict[Recompute, None] = {"none": None}
        for again in PARTIAL:
            same = again == ("norm", "activation") and not latents
            found["selective" if same else _without_latents(again, latents)] = None
        return [*found, "full"]

    def _given(self, name: str) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else []

    def _shardings(self, data: int) -> tuple[Sharding, ...]:
        """With one device in `data` they are all the same."""
        mine = self.cfg.parallel.data_sharding
        return SHARDINGS if data > 1 else (mine if mine != "fsdp" else "zero1",)

    def _chunks(self, pipeline: int) -> list[int]:
        """Virtual stages that make chunks of different sizes; of those that make the same, the fewest."""
        if pipeline == 1 or self.cfg.parallel.schedule == "gpipe":
            return [1]
        repeats = self.cfg.model.stack.repeats
        fewest: dict[int, int] = {}
        for chunks in range(1, repeats // pipeline + 1):
            fewest.setdefault(-(-repeats // (pipeline * chunks)), chunks)
        return list(fewest.values())

    def _micro_sizes(self, data: int) -> list[int]:
        rows = max(1, self.cfg.batch.global_size // data)
        return divisors(rows, max(1, self.cfg.batch.micro_size, MOST_TOKENS // self.cfg.model.sequence_length))


def _without_latents(again: Recompute, latents: bool) -> Recompute:
    if latents or isinstance(again, str):
        return again
    return tuple(part for part in again if part != "latent")


def divisors(number: int, most: int) -> list[int]:
    """Of a number, up to a largest, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
