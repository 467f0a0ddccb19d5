"""A layout: the settings that a search chooses, and the config with them in it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from megajax.config.dump import flatten
from megajax.config.errors import Problem
from megajax.layers.moe.config import MoEConfig
from megajax.layers.recompute import Recompute, Recomputing, format_recompute
from megajax.mesh.config import ContextStrategy
from megajax.models.facts import demand_facts
from megajax.models.protocol import ModelConfig
from megajax.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The settings that a search chooses, by the names of `SEARCHED`."""

    tensor: int
    pipeline: int
    virtual_stages: int
    data: int
    expert: int = 1
    context: int = 1
    context_strategy: ContextStrategy = "all_gather"
    data_sharding: Literal["replicate", "zero1", "fsdp"]
    shards: int | None = None
    sequence: bool
    micro_size: int
    side_by_side: int = 1
    dispatch_chunks: int = 1
    """Of all layers with experts; see DispatchConfig."""
    recompute: Recompute = "selective"
    recompute_layers: int | None = None
    offload: float = 0.0

    @property
    def layout(self) -> str:
        """For example "tensor 4, pipeline 4 x 5, data 4"."""
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        expert = f", expert {self.expert}" * (self.expert > 1)
        context = f", context {self.context} by {self.context_strategy}" * (self.context > 1)
        return f"tensor {self.tensor}, pipeline {self.pipeline}{chunks}, data {self.data}{expert}{context}"

    @property
    def family(self) -> tuple[bool, ...]:
        """Which kinds of parallelism it has: programs of a family exceed the formulas for memory by similar shares."""
        return self.pipeline > 1, self.context > 1, self.expert > 1, self.data_sharding == "fsdp"

    @property
    def complexity(self) -> tuple[int, int]:
        """Mesh axes, virtual stages and other means in use; chunks of the pipeline."""
        sizes = self.tensor, self.pipeline, self.virtual_stages, self.expert, self.context, self.dispatch_chunks
        sizes += (self.side_by_side,)
        means = sum(size > 1 for size in sizes) + (self.data_sharding == "fsdp") + (self.offload > 0)
        means += self.shards is not None
        return means, self.pipeline * self.virtual_stages

    @property
    def sharding(self) -> str:
        """For example "zero1, shards 8, 50% of moments in host memory"."""
        groups = "" if self.shards is None else f", shards {self.shards}"
        offloaded = f", {self.offload:.0%} of moments in host memory" if self.offload else ""
        return f"{self.data_sharding}{groups}{offloaded}"

    @property
    def recomputing(self) -> str:
        """For example "full, 3 layers"."""
        return format_recompute(self.recompute) + (
            "" if self.recompute_layers is None else f", {self.recompute_layers} layers"
        )

    @property
    def rows(self) -> str:
        """Of a microbatch, for example "1 x 2 side by side"."""
        return f"{self.micro_size}{' x 2 side by side' * (self.side_by_side > 1)}"

    @property
    def details(self) -> str:
        """For example "zero1, 2 rows, recompute full"."""
        chunks = f", experts in {self.dispatch_chunks} chunks" * (self.dispatch_chunks > 1)
        rows = f"{self.micro_size} row{'s' * (self.micro_size > 1)}" + " x 2 side by side" * (self.side_by_side > 1)
        return f"{self.sharding}, {rows}, recompute {self.recomputing}{chunks}"

    @property
    def kind(self) -> "Choice":
        """Without what leaves the mesh as it is: layouts of one kind appear once in a ranking."""
        defaults: dict[str, Any] = {"recompute_layers": None, "offload": 0.0, "dispatch_chunks": 1}
        return replace(self, recompute="none", context_strategy="all_gather", **defaults)

    @classmethod
    def of(cls, cfg: RunConfig, devices: int) -> "Choice":
        """The settings that a config has. Raises UserError for a model without facts."""
        recomputing = demand_facts(cfg.model).recomputing()
        fields: dict[str, Any] = {name: getattr(cfg.parallel, name) for name in _PARALLEL}
        fields |= {"data": cfg.parallel.data_size(devices), "micro_size": cfg.batch.micro_size}
        fields["side_by_side"] = cfg.batch.side_by_side
        fields |= {"recompute": recomputing.recompute, "recompute_layers": recomputing.layers}
        fields["dispatch_chunks"] = max((mlp.dispatch.chunks for mlp in mixtures(cfg.model)), default=1)
        return cls(**fields, offload=cfg.optimizer.offload)


def mixtures(model: ModelConfig) -> list[MoEConfig]:
    """The layers with experts of a model's last section."""
    return [block.mlp for block in model.stack.pattern if isinstance(block.mlp, MoEConfig)]


_PARALLEL = ("tensor", "pipeline", "virtual_stages", "data", "expert", "context", "context_strategy", "data_sharding",
             "shards", "sequence")  # fmt: skip
SEARCHED: Mapping[str, str] = MappingProxyType(
    {f"parallel.{name}": name for name in _PARALLEL}
    | {f"model.{name}": name for name in ("recompute", "recompute_layers")}
    | {"batch.micro_size": "micro_size", "batch.side_by_side": "side_by_side", "optimizer.offload": "offload"}
)
"""Settings that a search chooses -> their names in a Choice."""


def apply(choice: Choice, cfg: RunConfig) -> RunConfig:
    """The config with a choice in it, without settings that belong to its previous layout only."""
    old, model = cfg.parallel, demand_facts(cfg.model)
    schedule = old.schedule
    if choice.virtual_stages > 1 or schedule == "interleaved":
        schedule = "interleaved" if choice.virtual_stages > 1 else "1f1b"
    alike = (choice.pipeline, choice.virtual_stages) == (old.pipeline, old.virtual_stages)
    fields = {name: getattr(choice, name) for name in _PARALLEL}
    parallel = replace(old, **fields, schedule=schedule, layers=old.layers if alike else None)
    before = model.recomputing()
    recomputing = Recomputing(
        recompute=choice.recompute,
        layers=choice.recompute_layers,
        layers_per_checkpoint=before.layers_per_checkpoint if choice.recompute == "full" else 1,
    )
    recomputed = recomputing.recomputed_parts()
    offload = () if choice.recompute == "none" else tuple(part for part in before.offload if part not in recomputed)
    model = model.with_recomputing(replace(recomputing, offload=offload))
    if any(mlp.dispatch.chunks != choice.dispatch_chunks for mlp in mixtures(cfg.model)):
        model = _with_dispatch_chunks(model, choice.dispatch_chunks)
    return cfg.but(
        parallel=parallel,
        model=model,
        batch=replace(cfg.batch, micro_size=choice.micro_size, side_by_side=choice.side_by_side),
        # Every config is a dataclass; a Protocol cannot express that.
        optimizer=replace(cfg.optimizer, offload=choice.offload),  # ty: ignore[invalid-argument-type]
    )


def _with_dispatch_chunks(model: Any, chunks: int) -> Any:
    """The model with experts in this number of chunks."""
    blocks = [
        replace(block, mlp=replace(block.mlp, dispatch=replace(block.mlp.dispatch, chunks=chunks)))
        if isinstance(block.mlp, MoEConfig)
        else block
        for block in model.stack.pattern
    ]
    return replace(model, stack=model.stack.with_pattern(blocks))


def problems(cfg: RunConfig, devices: int) -> list[Problem]:
    """Problems of a layout on a number of devices; only the parts that a choice of layout changes are checked."""
    for name, part in {"parallel": cfg.parallel, "model": cfg.model, "batch": cfg.batch}.items():
        if part_problems := [replace(problem, setting=f"{name}.{problem.setting}") for problem in part.problems()]:
            return part_problems
    # The layout as it is written, not what parallel.elastic would make of it.
    return cfg.but(parallel=replace(cfg.parallel, elastic=False)).problems(devices)


def refusal(cfg: RunConfig, devices: int) -> str:
    """The first of the `problems`, in one line; empty if there are none."""
    return "".join(f"{problem.setting}: {problem.message}" for problem in problems(cfg, devices)[:1])


def changes(old: RunConfig, new: RunConfig) -> dict[str, Any]:
    """The settings that turn `old` into `new`: dotted name -> plain value."""
    before = flatten(old)
    return {name: value for name, value in flatten(new).items() if name not in before or before[name] != value}


def settings(changed: Mapping[str, Any]) -> list[str]:
    """Changed settings as on a command line, such as "parallel.tensor=4"."""

    def text(value: object) -> str:
        if isinstance(value, list):
            return ",".join(map(text, value))
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    return [f"{name}={text(value)}" for name, value in changed.items()]
