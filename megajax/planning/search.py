"""The fastest layout of a config on a cluster, by formulas: every combination that the rules and the memory allow.

A layout is a Choice of settings, which the config's own rules check.
Groups of (tensor, pipeline) are searched one after another, so that a search can report progress. Of each layout the
recompute policies are tried from the cheapest on.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import ceil, gcd, prod
from typing import Any

from megajax.config.dump import plain
from megajax.config.errors import UserError
from megajax.config.hints import divisors_of
from megajax.layers.recompute import SELECTIVE, Recompute, Recomputing
from megajax.mesh.config import ContextStrategy
from megajax.planning.choice import Choice, apply, mixtures, refusal
from megajax.planning.compiled.devices import GIB
from megajax.planning.cost.estimate import Case
from megajax.planning.cost.memory import footprint
from megajax.training.run_config import RunConfig

HEADROOM = 0.05
"""Fraction of usable memory that a layout must leave by formula: compiled plans are up to 5 % larger, and above 95 % of
the memory the compiler's scheduler hides less and less communication."""
BEST = 12
"""Layouts of a group that are listed at most."""
OFFLOADS = (0.5, 1.0)
"""Fractions of the moments in host memory that are tried where nothing fits without."""
MAX_TOKENS = 65_536
"""Tokens of a microbatch on a device, unless a single row has more: matmuls reach their full rate long before."""
LEAST_POSITIONS = 4096
"""Fewest positions of a row on a device of `context`, unless the config has fewer: other axes divide shorter rows."""
STRATEGIES: tuple[ContextStrategy, ...] = ("all_gather", "ring", "all_to_all", "ring+all_to_all")
DISPATCH_CHUNKS = (1, 4)
"""Values of dispatch.chunks that are tried where experts have room for all tokens."""
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

    @property
    def current(self) -> Choice:
        """The layout of the config as given, with the fixed settings; it may break rules or be too large."""
        choice = replace(Choice.of(self.case.cfg, self.devices), **self.fixed)
        if "data" in self.fixed or self.case.cfg.parallel.data is not None:
            return choice
        return replace(
            choice, data=max(1, self.devices // (choice.tensor * choice.pipeline * choice.expert * choice.context))
        )

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
        stages = self._parts_of_stack()
        tensors = self._values("tensor", divisors(self.devices, self.case.cluster.per_node))
        places = product(tensors, self._values("pipeline", divisors(self.devices, stages)))
        return [place for place in places if self.devices % prod(place) == 0 and any(map(bool, self.layouts(place)))]

    def layouts(self, place: Place) -> Iterator[Choice]:
        """All layouts of a group, each with the recompute policy that takes least memory."""
        (tensor, pipeline), cfg = place, self.case.cfg
        size, sharding = self.devices // prod(place), cfg.parallel.data_sharding
        # With one replica all are equal; replicated weights send and hold more than ZeRO-1 does.
        shardings = ("zero1", "fsdp") if size > 1 else ("zero1" if sharding == "fsdp" else sharding,)
        longest = max(section.positions for section in self.case.described.sections)
        policy = {"recompute": self.recomputes()[-1], "recompute_layers": None, "offload": 0.0}
        policy["context_strategy"] = cfg.parallel.context_strategy
        for context in self._contexts(size):
            replicas = size // context
            rows = max(1, cfg.batch.global_size // replicas)
            tokens = max(1, cfg.batch.micro_size, MAX_TOKENS * context // longest)
            options = {
                "expert": self._experts(replicas),
                "data_sharding": shardings,
                "sequence": [True, False] if tensor > 1 else [False],
                "virtual_stages": self._chunks(pipeline),
                "dispatch_chunks": self._dispatch_chunks(),
                "micro_size": divisors(rows, tokens),
                "side_by_side": [1, 2] if tensor > 1 else [1],
            }
            for values in product(*(self._values(name, choices) for name, choices in options.items())):
                fields: dict[str, Any] = policy | dict(self.fixed) | dict(zip(options, values, strict=True))
                fields |= {"tensor": tensor, "pipeline": pipeline, "context": context}
                fields["data"] = replicas // fields["expert"]
                even = rows // fields["micro_size"] % 2 == 0
                pairs = even if pipeline == 1 else fields["virtual_stages"] == 1
                if fields["side_by_side"] > 1 and (fields["data_sharding"] == "fsdp" or not pairs):
                    continue
                if fields["data"] == self.fixed.get("data", fields["data"]):
                    for shards in self._shards(fields):
                        fields["shards"] = shards
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

    def _dispatch_chunks(self) -> Sequence[int]:
        """Chunks of the dispatch; those of the config where tokens may be dropped: which ones depends on it."""
        layers = mixtures(self.case.cfg.model)
        now = Choice.of(self.case.cfg, self.devices).dispatch_chunks
        free = layers and all(mlp.dispatch.room is None for mlp in layers)
        return sorted({now, *DISPATCH_CHUNKS}) if free else [now]

    def _contexts(self, most: int) -> list[int]:
        """Sizes of `context` that divide the devices, where the model allows it and rows are long."""
        cfg = self.case.cfg
        positions = max(section.positions for section in self.case.described.sections)
        longest = max(cfg.parallel.context, positions // LEAST_POSITIONS)
        sizes = divisors(most, longest) if cfg.model.allows_context() else [1]
        return [n for n in self._values("context", sizes) if most % n == 0]

    def with_strategies(self, choice: Choice) -> list[Choice]:
        """The choice with other strategies of `context`, and the recompute policy that takes least memory."""
        if choice.context == 1 or "context_strategy" in self.fixed:
            return []
        others = [strategy for strategy in STRATEGIES if strategy != choice.context_strategy]
        least = replace(choice, recompute=self.recomputes()[-1], recompute_layers=self.fixed.get("recompute_layers"))
        return [replace(least, context_strategy=strategy) for strategy in others]

    def _parts_of_stack(self) -> int:
        """Parts that a pipeline may cut the stack into: repeats of its pattern, or layers of segments.

        Models with several sections have no pipeline.
        """
        if len(self.case.described.sections) > 1:
            return 1
        stack = self.case.cfg.model.stack
        return stack.layers() // stack.cut_unit()

    def _shards(self, fields: Mapping[str, Any]) -> Sequence[int | None]:
        """Sizes of groups that shard weights: all devices of `data`; with FSDP also those of a node.

        Larger groups gather between nodes as all devices do. ZeRO-1 would send more between nodes in groups.
        """
        shards, rest = divmod(
            self.case.cluster.per_node, prod(fields[axis] for axis in ("expert", "context", "tensor"))
        )
        fits = shards and not rest and shards < fields["data"] and fields["data"] % shards == 0
        return self._values("shards", [None, *[shards] * (fits and fields["data_sharding"] == "fsdp")])

    def _chunks(self, pipeline: int) -> list[int]:
        """Numbers of virtual stages that give chunks of different sizes; of equal ones, the smallest number."""
        if pipeline == 1 or self.case.cfg.parallel.schedule == "gpipe":
            return [1]
        parts = self._parts_of_stack()
        fewest: dict[int, int] = {}
        for chunks in range(1, max(1, parts // pipeline) + 1):
            fewest.setdefault(-(-parts // (pipeline * chunks)), chunks)
        return list(fewest.values())


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to `most`, ascending."""
    return [n for n in divisors_of(number) if n <= most] if number else []


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout with its figures by formula."""

    choice: Choice
    step_seconds: float
    """0 if not estimated."""
    peak: float
    """Bytes of a device."""


@dataclass(slots=True)
class LayoutGroup:
    """Result for one (tensor, pipeline)."""

    place: Place
    best: list[RankedLayout] = field(default_factory=list)
    """Fastest first; layouts of one kind appear once."""
    smallest: RankedLayout | None = None
    refusals: Counter[str] = field(default_factory=Counter)
    """Reason -> number of layouts."""
    too_large: int = 0
    estimated: int = 0

    def fits(self, task: Task, choice: Choice) -> bool:
        """Whether the rules allow a choice and it fits; otherwise it is counted."""
        case = task.with_choice(choice)
        if reason := refusal(case.cfg, case.cluster.devices):
            self.refusals[reason] += 1
            return False
        peak = footprint(case.described).peak
        if self.smallest is None or peak < self.smallest.peak:
            self.smallest = RankedLayout(choice, 0.0, peak)
        self.too_large += peak > task.limit
        return peak <= task.limit

    def entries(self, task: Task, choice: Choice) -> list[RankedLayout]:
        """The choice with its figures, if it fits and the rules allow it; otherwise it is only counted."""
        case = task.with_choice(choice)
        peak = footprint(case.described).peak
        if peak > task.limit:
            self.too_large += 1
            return []
        if reason := refusal(case.cfg, case.cluster.devices):
            self.refusals[reason] += 1
            return []
        self.estimated += 1
        return [RankedLayout(choice, case.estimate.step_seconds, peak)]


def search(task: Task) -> Iterator[LayoutGroup]:
    """All groups. Raises UserError if the fixed settings leave none."""
    places = task.groups()
    if not places:
        raise UserError(
            f"nothing to search: no layout of {task.devices} devices has {task.fixed_text()}.\n"
            f"tensor x pipeline x data x expert must be {task.devices}; give other values, or fewer of them."
        )
    yield from (explore(task, place) for place in places)


def explore(task: Task, place: Place) -> LayoutGroup:
    """Search one group. Moments are offloaded only if none of its layouts fits without."""
    group = LayoutGroup(place)
    entries = [*_fitting(task, group, [task.fixed.get("offload", 0.0)])]
    if not entries and "offload" not in task.fixed and group.smallest is not None:
        entries = [*_fitting(task, group, OFFLOADS)]
    # Strategies of `context` matter less than its size: they are tried for the best layouts.
    others = [choice for entry in _best_of_kinds(entries) for choice in task.with_strategies(entry.choice)]
    entries += [entry for least in others if group.fits(task, least) for entry in _with_policies(task, group, least)]
    group.best = _best_of_kinds(entries)
    return group


def _best_of_kinds(entries: Iterable[RankedLayout]) -> list[RankedLayout]:
    """The fastest layouts; those of one kind appear once."""
    kinds: dict[Choice, RankedLayout] = {}
    for entry in sorted(entries, key=rank):
        kinds.setdefault(entry.choice.kind, entry)
    return list(kinds.values())[:BEST]


def rank(entry: RankedLayout) -> tuple[float, int, float]:
    """Sort key: step time to three digits, as precise as the model; then the shorter pipeline; then less memory."""
    return float(f"{entry.step_seconds:.2e}"), entry.choice.pipeline * entry.choice.virtual_stages, entry.peak


def _fitting(task: Task, group: LayoutGroup, offloads: Sequence[float]) -> Iterator[RankedLayout]:
    """Layouts of a group that fit, with the recompute policies that may be the fastest: of those that fit, no other
    recomputes only a part of the same."""
    too_large: set[Choice] = set()  # without their rows: layouts with more rows are larger
    whole: set[Choice] = set()  # those that fit; experts in more chunks are slower
    for offload, layout in product(offloads, task.layouts(group.place)):
        least = replace(layout, offload=offload)
        if (unchunked := replace(least, dispatch_chunks=0)) in whole:
            continue
        if (alike := replace(least, micro_size=1)) in too_large:
            group.too_large += 1
        elif group.fits(task, least):
            whole.add(unchunked)
            yield from _with_policies(task, group, least)
        elif not refusal((case := task.with_choice(least)).cfg, case.cluster.devices):
            too_large.add(alike)


def _with_policies(task: Task, group: LayoutGroup, least: Choice) -> Iterator[RankedLayout]:
    """The entries of `_fitting` for one layout."""
    fitting: list[frozenset[str]] = []
    for recompute in task.recomputes():
        parts, choice = (
            frozenset(Recomputing(recompute=recompute).recomputed_parts()),
            replace(least, recompute=recompute),
        )
        slower = any(fewer <= parts for fewer in fitting)
        entries = [] if slower else group.entries(task, choice)
        yield from entries
        fitting += [parts] * bool(entries)
        some = recompute in ("selective", "full") and not {"recompute", "recompute_layers"} & {*task.fixed}
        if some and (entries or frozenset(SELECTIVE) not in fitting):
            yield from _some_layers(task, choice, group)


def _some_layers(task: Task, choice: Choice, group: LayoutGroup) -> list[RankedLayout]:
    """The policy on the fewest layers of each chunk with which it fits: memory is linear in their number."""
    stack = task.case.cfg.model.stack
    size, rows = len(stack.pattern), int(task.with_choice(choice).described.towers[-1].rows)
    if len(stack.parts()) > 1 or rows < 2:  # a number of layers is one of the repeats of one pattern
        return []

    def some(repeats: int) -> Choice:
        return replace(choice, recompute_layers=repeats * size)

    most, least = (footprint(task.with_choice(some(repeats)).described).peak for repeats in (1, rows))
    if least > task.limit or most == least:
        return []
    enough = max(1, ceil(1 + (most - task.limit) / (most - least) * (rows - 1) - 1e-9))
    return group.entries(task, some(enough)) if enough < rows else []


def ranked(groups: Iterable[LayoutGroup]) -> list[RankedLayout]:
    """The best layouts of all groups, fastest first."""
    return sorted((entry for group in groups for entry in group.best), key=rank)
