"""Exposed seconds of exchanges with experts, compiled and by formula."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.planning.expert_traffic import MODELS, PER_NODE, TOKENS, config
from megajax.compiled import gpus
from megajax.compiled.hlo import rounds
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig
from megajax.layers.recompute import Recompute
from megajax.mesh.config import ParallelConfig
from megajax.planning.cost.estimate import Case
from megajax.planning.program.train_step import TrainPlan, compile_train_step

LAYERS, MICROBATCHES = 4, 4
NAMED: dict[str, tuple[int, MoEConfig]] = {
    **MODELS,
    "deepseek_v3": (7168, replace(MODELS["deepseek_v3"][1], experts=64)),  # as many as memory has room for
    "qwen3": (2048, MoEConfig(experts=128, top_k=8, expert=GatedMLPConfig(ffn=768))),
}
ROOM = {"gather": 1.5, "capacity": 1.25}


class Program(NamedTuple):
    """Layers whose experts are on all devices of `expert`."""

    model: str
    way: str
    nodes: int
    tensor: int
    recompute: Recompute
    held_back: bool = True
    """The formula was written without it."""

    @property
    def name(self) -> str:
        recompute = self.recompute if isinstance(self.recompute, str) else "+".join(self.recompute or ("none",))
        return f"{self.model} {self.way} nodes={self.nodes} tensor={self.tensor} {recompute}"


LIGHT = ("norm", "activation", "mlp")
PROGRAMS = (
    Program("mixtral", "capacity", 1, 1, "full", held_back=False),
    Program("mixtral", "gather", 1, 1, "selective", held_back=False),
    Program("deepseek_v3", "gather", 1, 1, "full", held_back=False),
    Program("deepseek_v3", "gather", 2, 2, "selective", held_back=False),
    Program("qwen3", "gather", 1, 1, LIGHT),
    Program("mixtral", "gather", 2, 2, "full"),
    Program("deepseek_v3", "capacity", 1, 1, "selective"),
    Program("qwen3", "capacity", 2, 1, "full"),
)


def exchanges(*, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Milliseconds of exchanges with experts in a step of four layers, in all and exposed, compiled and by formula.

    Needs the extra aot; no GPU. About 20 minutes. Four microbatches of a row of 4096 tokens per group, on virtual
    H100s. The formula was written after the first four programs; the others are held back. --only: programs whose name
    contains one of these.
    """
    gpus.prepare()
    figures: dict[str, Any] = {}
    for program in PROGRAMS:
        if not only or any(word in program.name for word in only):
            figures[program.name] = {"held_back": program.held_back} | measured(program)
            print(f"{program.name}: {figures[program.name]}", flush=True)
            yield figures


def measured(program: Program) -> dict[str, Any]:
    """Figures of one program: [in all, exposed] of each pass."""
    hidden, moe = NAMED[program.model]
    dispatch, devices = DispatchConfig(way=program.way, room=ROOM[program.way]), program.nodes * PER_NODE  # ty: ignore
    expert = devices // program.tensor
    moe = replace(moe, dispatch=dispatch, experts=max(moe.experts, expert))
    cfg: Any = config(hidden, moe, expert)
    cfg = cfg.but(
        model=replace(cfg.model, stack=replace(cfg.model.stack, repeats=LAYERS), recompute=program.recompute),
        parallel=ParallelConfig(expert=expert, tensor=program.tensor, sequence=program.tensor > 1),
        batch=replace(cfg.batch, global_size=MICROBATCHES * expert),
    )
    case = Case(cfg, gpus.Cluster(gpus.GPUS["h100"], devices, PER_NODE))
    rows = [row for row in case.estimate.traffic if "experts, " in row.what]
    figures: dict[str, Any] = {"tokens": TOKENS}
    compiled = of_program(compile_train_step(cfg, case.cluster))
    for way in ("forward", "backward"):
        every = [row for row in rows if row.what.endswith(way)]
        formula = sum(row.seconds for row in every), sum(row.seconds - row.hidden for row in every)
        for name, seconds in (("formula", formula), ("compiled", compiled[way])):
            figures[f"{way}, {name}"] = [round(1e3 * part, 2) for part in seconds]
    return figures


def of_program(plan: TrainPlan) -> dict[str, tuple[float, float]]:
    """Pass -> seconds of collectives over `expert` in its loops, and exposed ones."""
    program, exposed = plan.costs.program, dict(plan.timeline.exposed)
    backward = {
        name for home in program.computations.values() for name, op in home.items() if "transpose(" in op.origin
    }
    seconds = {"forward": (0.0, 0.0), "backward": (0.0, 0.0)}
    for collective in plan.contents.collectives:
        place = collective.place
        if "expert" not in collective.groups.axes or not place.path:
            continue
        way = "backward" if collective.name in backward else "forward"
        times = place.share * rounds(place.trips, plan.unknown_trips)
        total, waits = seconds[way]
        # An instruction in several places counts in the first.
        waits += exposed.pop(collective.name, 0.0)
        seconds[way] = total + times * plan.costs.of_message(collective), waits
    return seconds
