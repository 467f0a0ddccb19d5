"""The page of a compiled plan: memory as the compiler has it, times of its collectives."""

from megajax.planning.bars import Part
from megajax.planning.cost.costs import Device
from megajax.planning.cost.step_time import step_time
from megajax.planning.page import COMPILED, Page, of_plan
from megajax.planning.program.devices import GIB
from megajax.planning.program.train_step import TrainPlan


def of_compiled(plan: TrainPlan, device: Device, name: str) -> Page:
    """Of one plan."""
    memory = plan.memory
    rest = memory.arguments - memory.parameters - memory.optimizer + memory.outputs - memory.aliased
    sizes = (
        ("master weights", memory.parameters, "master"),
        ("optimizer state", memory.optimizer, "state"),
        ("temporary: weights in compute dtype, gradients, activations", memory.temporary, "activations"),
        ("batch and outputs", rest, "working"),
    )
    held = [Part(told, size / GIB, f"{size / GIB:.1f}", color) for told, size, color in sizes if size > 0]
    return of_plan(step_time(plan, device), name, held=held, about=COMPILED)
