"""The fastest layout of a config on a cluster, by formulas: every combination that the rules and the memory allow.

A layout is a Choice of settings. `apply` puts it into a config, whose own rules check it.
Groups of (tensor, pipeline) are searched one after another, so that a search can report progress. Of each layout the
recompute policies are tried from the cheapest on.
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Any, Literal

from megajax.compiled.gpus import GIB
from megajax.config.dump import flatten, plain
from megajax.config.errors import Problem, UserError
from megajax.config.hints import divisors_of
from megajax.layers.recompute import Recompute, Recomputing, format_recompute
from megajax.models.facts import demand_facts
from megajax.planning.cost.device_work import footprint
from megajax.planning.cost.estimate import Case
from megajax.training.run_config import RunConfig

HEADROOM = 0.05
"""Fraction of usable memory that a layout must leave by formula: compiled plans are up to 3 % larger, and above 95 % of
the memory the compiler's scheduler hides less and less communication."""
BEST = 12
"""Layouts of a group that are listed at most."""
OFFLOADS = (0.5, 1.0)
"""Fractions of the moments in host memory that are tried where nothing fits without."""
MAX_TOKENS = 65_536
"""Tokens of a microbatch on a device, unless a single row has more: matmuls reach their full rate long before."""
LEAST_POSITIONS = 8192
"""Fewest positions of a row on a device of `context`, unless the config has fewer: other axes divide shorter rows."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The settings that a search chooses, by the names of `SEARCHED`."""

    tensor: int
    pipeline: int
    virtual_stages: int
    data: int
    expert: int = 1
    context: int = 1
    data_sharding: Literal["replicate", "zero1", "fsdp"]
    sequence: bool
    micro_size: int
    recompute: Recompute = "selective"
    recompute_layers: int | None = None
    offload: float = 0.0

    @property
    def layout(self) -> str:
        """For example "tensor 4, pipeline 4 x 5, data 4"."""
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        axes = "".join(f", {axis} {getattr(self, axis)}" for axis in ("expert", "context") if getattr(self, axis) > 1)
        return f"tensor {self.tensor}, pipeline {self.pipeline}{chunks}, data {self.data}{axes}"

    @property
    def sharding(self) -> str:
        """For example "zero1, 50% of moments in host memory"."""
        return self.data_sharding + (f", {self.offload:.0%} of moments in host memory" if self.offload else "")

    @property
    def recomputing(self) -> str:
        """For example "full, 3 layers"."""
        return format_recompute(self.recompute) + (
            "" if self.recompute_layers is None else f", {self.recompute_layers} layers"
        )

    @property
    def details(self) -> str:
        """For example "zero1, 2 rows, recompute full"."""
        return f"{self.sharding}, {self.micro_size} row{'s' * (self.micro_size > 1)}, recompute {self.recomputing}"

    @property
    def kind(self) -> "Choice":
        """Without the recompute policy and offload: layouts of one kind appear once in a ranking."""
        return replace(self, recompute="none", recompute_layers=None, offload=0.0)

    @classmethod
    def of(cls, cfg: RunConfig, devices: int) -> "Choice":
        """The settings that a config has. Raises UserError for a model without facts."""
        recomputing = demand_facts(cfg.model).recomputing()
        fields: dict[str, Any] = {name: getattr(cfg.parallel, name) for name in _PARALLEL}
        fields |= {"data": cfg.parallel.data_size(devices), "micro_size": cfg.batch.micro_size}
        fields |= {"recompute": recomputing.recompute, "recompute_layers": recomputing.layers}
        return cls(**fields, offload=cfg.optimizer.offload)


_PARALLEL = ("tensor", "pipeline", "virtual_stages", "data", "expert", "context", "data_sharding", "sequence")
SEARCHED: Mapping[str, str] = MappingProxyType(
    {f"parallel.{name}": name for name in _PARALLEL}
    | {f"model.{name}": name for name in ("recompute", "recompute_layers")}
    | {"batch.micro_size": "micro_size", "optimizer.offload": "offload"}
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
    return cfg.but(
        parallel=parallel,
        model=model.with_recomputing(replace(recomputing, offload=offload)),
        batch=replace(cfg.batch, micro_size=choice.micro_size),
        # Every config is a dataclass; a Protocol cannot express that.
        optimizer=replace(cfg.optimizer, offload=choice.offload),  # ty: ignore[invalid-argument-type]
    )


def problems(cfg: RunConfig, devices: int) -> list[Problem]:
    """Problems of a config with a choice in it; only the parts that a choice changes are checked."""
    parallel = [replace(problem, setting=f"parallel.{problem.setting}") for problem in cfg.parallel.problems()]
    model = [replace(problem, setting=f"model.{problem.setting}") for problem in cfg.model.problems()]
    # The layout as it is written, not what parallel.elastic would make of it.
    return parallel or model or cfg.but(parallel=replace(cfg.parallel, elastic=False)).problems(devices)


def refusal(case: Case) -> str:
    """The first of the `problems`, in one line; empty if there are none."""
    return "".join(f"{problem.setting}: {problem.message}" for problem in problems(case.cfg, case.cluster.devices)[:1])


def changes(old: RunConfig, new: RunConfig) -> dict[str, Any]:
    """The settings that turn `old` into `new`: dotted name -> plain value."""
    before = flatten(old)
    return {name: value for name, value in flatten(new).items() if name not in before or before[name] != value}


def settings(changed: Mapping[str, Any]) -> list[str]:
    """Changed settings as on a command line, such as "parallel.tensor=4"."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(text, value))
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    return [f"{name}={text(value)}" for name, value in changed.items()]


type Place = tuple[int, int]
"""(tensor, pipeline) of a group."""


@dataclass(frozen=True, slots=True)
class Task:
    """A search over all layouts of a config on a cluster."""

    case: Case
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a Choice that the user has given."""
    limit_gib: float | None = None
    """Largest peak of a layout by formula; None: usable memory less HEADROOM."""

    @property
    def devices(self) -> int:
        return self.case.cluster.devices

    @property
    def limit(self) -> float:
        """Bytes that a layout may take by formula."""
        usable = self.case.usable_gib * (1 - HEADROOM)
        return GIB * (usable if self.limit_gib is None else self.limit_gib)

    def with_choice(self, choice: Choice) -> Case:
        return replace(self.case, cfg=apply(choice, self.case.cfg))

    def config(self, choice: Choice) -> RunConfig:
        """With a choice, for users; `data` is left open, unless it was given or is in the config already."""
        cfg, data = apply(choice, self.case.cfg), self.case.cfg.parallel.data
        keep = "data" in self.fixed or data == choice.data
        return cfg if keep else cfg.but(parallel=replace(cfg.parallel, data=None))

    def fixed_text(self) -> str:
        """The settings that the user has given: "tensor=4, micro_size=2"."""
        return ", ".join(f"{name}={value}" for name, value in self.fixed.items())

    def fingerprint(self) -> str:
        """Hash of all that the result depends on: config, fixed settings, devices and their constants."""
        device, *nodes = self.case.cluster
        parts = [plain(self.case.cfg), dict(sorted(self.fixed.items())), [device.name, *nodes], asdict(device)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def groups(self) -> list[Place]:
        """(tensor, pipeline) of the layouts that use all devices."""
        # No pipeline of several sections.
        stages = self.case.cfg.model.stack.repeats if len(self.case.described.sections) == 1 else 1
        tensors = self._values("tensor", divisors(self.devices, self.case.cluster.per_node))
        places = product(tensors, self._values("pipeline", divisors(self.devices, stages)))
        return [place for place in places if self.devices % prod(place) == 0 and any(map(bool, self.layouts(place)))]

    def layouts(self, place: Place) -> Iterator[Choice]:
        """All layouts of a group, each with the recompute policy that takes least memory."""
        (tensor, pipeline), cfg = place, self.case.cfg
        size, sharding = self.devices // prod(place), cfg.parallel.data_sharding
        # With one replica all are equal.
        shardings = ("zero1", "fsdp", "replicate") if size > 1 else ("zero1" if sharding == "fsdp" else sharding,)
        longest = max(section.positions for section in self.case.described.sections)
        policy = {"recompute": self.recomputes()[-1], "recompute_layers": None, "offload": 0.0}
        for context in self._contexts(size):
            replicas = size // context
            rows = max(1, cfg.batch.global_size // replicas)
            tokens = max(1, cfg.batch.micro_size, MAX_TOKENS * context // longest)
            options = {
                "expert": self._experts(replicas),
                "data_sharding": shardings,
                "sequence": [True, False] if tensor > 1 else [False],
                "virtual_stages": self._chunks(pipeline),
                "micro_size": divisors(rows, tokens),
            }
            for values in product(*(self._values(name, choices) for name, choices in options.items())):
                fields: dict[str, Any] = policy | dict(self.fixed) | dict(zip(options, values, strict=True))
                fields |= {"tensor": tensor, "pipeline": pipeline, "context": context}
                fields["data"] = replicas // fields["expert"]
                if fields["data"] == self.fixed.get("data", fields["data"]):
                    yield Choice(**fields)

    def recomputes(self) -> list[Recompute]:
        """Recompute policies, least recomputing first; those with latents only for models that have any."""
        if "recompute" in self.fixed:
            return [self.fixed["recompute"]]
        policies: list[Recompute] = ["none", *PARTIAL, "full"]
        if any("latent" in block.tensors for tower in self.case.described.towers for block in tower.blocks):
            return policies
        # Without latents, norm and activation are what "selective" recomputes.
        without_latents = (p if isinstance(p, str) else tuple(part for part in p if part != "latent") for p in policies)
        return [policy for policy in without_latents if policy != ("norm", "activation")]

    def _values(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return [self.fixed[name]] if name in self.fixed else values

    def _experts(self, most: int) -> list[int]:
        """Sizes of `expert` that divide the devices and the experts of every layer."""
        blocks = (block for tower in self.case.described.towers for block in tower.blocks)
        experts = gcd(*(layer.experts for block in blocks for layer in block.experts))
        return [n for n in divisors(experts, most) if most % n == 0] or [1]

    def _contexts(self, most: int) -> list[int]:
        """Sizes of `context` that divide the devices, where the model allows it and rows are long."""
        cfg = self.case.cfg
        positions = max(section.positions for section in self.case.described.sections)
        longest = max(cfg.parallel.context, positions // LEAST_POSITIONS)
        sizes = divisors(most, longest) if cfg.model.allows_context() else [1]
        return [n for n in self._values("context", sizes) if most % n == 0]

    def _chunks(self, pipeline: int) -> list[int]:
        """Numbers of virtual stages that give chunks of different sizes; of equal ones, the smallest number."""
        if pipeline == 1 or self.case.cfg.parallel.schedule == "gpipe":
            return [1]
        repeats = self.case.cfg.model.stack.repeats
        fewest: dict[int, int] = {}
        for chunks in range(1, repeats // pipeline + 1):
            fewest.setdefault(-(-repeats // (pipeline * chunks)), chunks)
        return list(fewest.values())


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to `most`, ascending."""
    return [n for n in divisors_of(number) if n <= most] if number else []


@dataclass(frozen=True, slots=True)
class Entry:
    """A layout with its figures by formula."""

    choice: Choice
    step_seconds: float
    """0 if not estimated."""
    peak: float
    """Bytes of a device."""


@dataclass(slots=True)
class Group:
    """Result for one (tensor, pipeline)."""

    place: Place
    best: list[Entry] = field(default_factory=list)
    """Fastest first; layouts of one kind appear once."""
    smallest: Entry | None = None
    refusals: Counter[str] = field(default_factory=Counter)
    """Reason -> number of layouts."""
    too_large: int = 0
    estimated: int = 0

    def entries(self, task: Task, choice: Choice, *, timed: bool = True) -> list[Entry]:
        """The choice with its figures, if the rules allow it and it fits; otherwise it is only counted."""
        case = task.with_choice(choice)
        if reason := refusal(case):
            self.refusals[reason] += 1
            return []
        peak = footprint(case.described).peak
        if self.smallest is None or peak < self.smallest.peak:
            self.smallest = Entry(choice, 0.0, peak)
        if peak > task.limit:
            self.too_large += 1
            return []
        self.estimated += timed
        return [Entry(choice, case.estimate.step_seconds if timed else 0.0, peak)]


def search(task: Task) -> Iterator[Group]:
    """All groups. Raises UserError if the fixed settings leave none."""
    places = task.groups()
    if not places:
        raise UserError(
            f"nothing to search: no layout of {task.devices} devices has {task.fixed_text()}.\n"
            f"tensor x pipeline x data x expert must be {task.devices}; give other values, or fewer of them."
        )
    yield from (explore(task, place) for place in places)


def explore(task: Task, place: Place) -> Group:
    """Search one group. Moments are offloaded only if none of its layouts fits without."""
    group = Group(place)
    entries = [*_fitting(task, group, [task.fixed.get("offload", 0.0)])]
    if not entries and "offload" not in task.fixed and group.smallest is not None:
        entries = [*_fitting(task, group, OFFLOADS)]
    kinds: dict[Choice, Entry] = {}
    for entry in sorted(entries, key=rank):
        kinds.setdefault(entry.choice.kind, entry)
    group.best = list(kinds.values())[:BEST]
    return group


def rank(entry: Entry) -> tuple[float, int, float]:
    """Sort key: rounded step time; then the shorter pipeline; then less memory."""
    return rounded(entry.step_seconds), entry.choice.pipeline * entry.choice.virtual_stages, entry.peak


def rounded(seconds: float) -> float:
    """Seconds rounded to three digits, the precision of the cost model."""
    return float(f"{seconds:.2e}")


def _fitting(task: Task, group: Group, offloads: Sequence[float]) -> Iterator[Entry]:
    """Layouts of a group that fit, with each recompute policy that fits; nothing is faster than no recomputing."""
    for offload, layout in product(offloads, task.layouts(group.place)):
        least = replace(layout, offload=offload)
        if not group.entries(task, least, timed=False):
            continue
        for recompute in task.recomputes():
            choice = replace(least, recompute=recompute)
            entries = group.entries(task, choice)
            yield from entries
            if entries and recompute == "none":
                break
            if entries and recompute in ("selective", "full") and not {"recompute", "recompute_layers"} & {*task.fixed}:
                yield from _some_layers(task, choice, group)


def _some_layers(task: Task, choice: Choice, group: Group) -> list[Entry]:
    """The policy on the fewest layers of each chunk with which it fits, by bisection."""
    stack = task.case.cfg.model.stack
    size, rows = len(stack.pattern), task.with_choice(choice).described.towers[-1].rows

    def fits(repeats: int) -> bool:
        case = task.with_choice(replace(choice, recompute_layers=repeats * size))
        return footprint(case.described).peak <= task.limit

    # A number of layers is one of the repeats of one pattern.
    enough = bisect_left(range(1, int(rows)), True, key=fits) + 1 if len(stack.parts()) == 1 else rows
    return group.entries(task, replace(choice, recompute_layers=enough * size)) if enough < rows else []


def ranked(groups: Iterable[Group]) -> list[Entry]:
    """The best layouts of all groups, fastest first."""
    return sorted((entry for group in groups for entry in group.best), key=rank)
