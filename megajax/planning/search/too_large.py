"""A compiled plan that does not fit: its largest arrays, and the cheapest changes, corrected by the compiler's peak."""

from typing import TextIO

from megajax.planning.cost.costs import Device
from megajax.planning.program.devices import GIB
from megajax.planning.program.largest import largest
from megajax.planning.program.train_step import TrainPlan
from megajax.planning.search import whatif

CHANGED = 0.03
"""Share of usable memory left for what a change does to that difference."""


def show(plan: TrainPlan, device: Device, file: TextIO | None = None) -> None:
    """Print both. Peaks of changes are the formula's, plus what this program is larger by formula."""
    here = whatif.Situation(cfg=plan.cfg, cluster=plan.cluster, device=device)
    excess = plan.memory.peak / GIB - here.now.memory.peak_gib
    here = whatif.Situation(cfg=plan.cfg, cluster=plan.cluster, device=device, excess=excess, margin=CHANGED)
    whatif.show(here, largest(plan.text), file)
