"""What the cost model wants to know of a run: a small description that a RunConfig maps to.

It may describe more than a config may ask for today: context parallelism, fp8, and programs of other systems, which
differ from ours in what they hide behind what. So published runs can be predicted (benchmarks/planner_accuracy.py).
"""

from dataclasses import dataclass, replace
from typing import Literal

from megajax.config.errors import UserError
from megajax.layers.remat import Recomputing
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig
from megajax.optim.config import LionConfig, SGDConfig
from megajax.planning.cost.costs import Device
from megajax.planning.program.devices import MOST_DEVICES
from megajax.training.run_config import RunConfig

type Compute = Literal["bfloat16", "float16", "float32", "fp8"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 2}
"""Of an activation, a weight in use or a gradient; with fp8, matmuls alone are in fp8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What a training system's program does beside the arithmetic."""

    name: str
    lockstep: bool = False
    """Stages go through ticks together, as ours; otherwise each runs as soon as its input is there."""
    head: Literal["spread", "last"] = "last"
    """Who makes the loss: all stages, each its share of the vocabulary, or the last one."""
    data_hidden: bool = True
    """Weights are gathered beside the first microbatch's forward, gradients reduced beside the last one's backward."""
    tensor_hidden: float | None = None
    """Share of the time of collectives over `tensor` that matmuls hide; None: as counted in our compiled programs."""
    adds_in_matmul: bool = True
    """The product that makes a weight's gradient adds it to those of the microbatches before, in place; otherwise the
    gradient goes through memory, and so does the sum."""
    most_in_place: int | None = None
    """Chunks of a stage up to which matmuls use a layer's weights and sums of gradients where they are; None: always.
    With more, weights are copied out of their stack, and sums out and in."""
    joined: bool = True
    """Queries, keys and values are one matrix, gate and up another; otherwise their products are apart."""
    stacked: bool = False
    """Loops of XLA: what a layer keeps for its backward pass is copied into a stack, and what attention reads out of
    it."""
    fused_loss: bool = True
    """The loss works on chunks of tokens; otherwise all logits go through memory several times."""
    overhead: float = 1.0
    """Factor on the time of matmuls and what streams through memory, for an old or a new generation of kernels."""


OURS = System(
    name="MegaJAX",
    lockstep=True,
    head="spread",
    data_hidden=False,
    most_in_place=8,  # MOST_LOOPS of pipeline.executor
    joined=False,
    stacked=True,
)
"""What `python -m megajax.plan --config` finds in the compiled program, see docs/planning.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A run, as far as its speed and memory depend on it. Hashable."""

    model: DecoderConfig
    parallel: ParallelConfig
    """With `data` given; its problems() are not asked: context may be above 1."""
    device: Device
    per_node: int
    """Devices that NVLink connects."""
    global_size: int
    """Rows of a step."""
    micro_size: int = 1
    """Rows of a microbatch on each data-parallel device."""
    compute: Compute = "bfloat16"
    gradients: str = "float32"
    """Dtype in which gradients are added up over microbatches."""
    reduce: str | None = None
    """Dtype in which they are reduced over devices; None: as they were added up."""
    moments: int = 2
    """Arrays of the optimizer for each weight."""
    moment_bytes: int = 4
    moments_away: float = 0.0
    """Share of them that waits in host memory between updates."""
    steps: int = 0
    """Of the whole run; 0: not known."""
    system: System = OURS

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size, outermost first."""
        return self.parallel.sizes(0)

    @property
    def devices(self) -> int:
        total = 1
        for size in self.sizes.values():
            total *= size
        return total

    @property
    def replicas(self) -> int:
        """Devices that work on different rows."""
        return (self.parallel.data or 1) * self.parallel.expert

    @property
    def shards(self) -> int:
        """Devices that hold the same dense weights: those that ZeRO and FSDP spread them over."""
        return self.replicas * self.parallel.context

    @property
    def microbatches(self) -> int:
        return max(1, self.global_size // (self.micro_size * self.replicas))

    @property
    def tokens(self) -> int:
        """Of a microbatch, on each device of `context`."""
        return self.micro_size * self.model.sequence_length // self.parallel.context

    @property
    def step_tokens(self) -> int:
        """Of a step, all devices together."""
        return self.microbatches * self.micro_size * self.replicas * self.model.sequence_length

    @property
    def rows(self) -> int:
        """Repeats of the stack's pattern in a chunk of the pipeline; chunks with fewer are padded."""
        if self.parallel.layers is not None and self.parallel.pipeline > 1:
            return max(self.parallel.layers)
        return -(-self.model.stack.repeats // self.parallel.chunks())

    @property
    def in_place(self) -> bool:
        """Whether matmuls use weights and sums of gradients where they are, see `System.most_in_place`."""
        most = self.system.most_in_place
        return most is None or self.parallel.virtual_stages <= most

    @property
    def recomputing(self) -> Recomputing:
        return self.model.recomputing()

    @property
    def recomputing_share(self) -> float:
        """Share of the layers that recompute as the model says; the others do one step less."""
        layers = self.recomputing.layers
        return 1.0 if layers is None else min(1.0, layers / (len(self.model.stack.pattern) * self.rows))

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return BYTES[self.compute]

    @property
    def cut(self) -> int:
        """Devices over which activations between the matmuls of a block are cut along the sequence."""
        return self.parallel.tensor if self.parallel.sequence else 1


def describe(cfg: RunConfig, device: Device, devices: int, per_node: int | None = None) -> Description:
    """Of a config that passes its checks on that many devices.

    Raises UserError for more than MOST_DEVICES devices.
    """
    if devices > MOST_DEVICES:
        raise UserError(
            f"{devices:,} devices asked for, plans are made for at most {MOST_DEVICES:,}.\n"
            "Give fewer --devices: a run's speed per device hardly changes with more data parallelism."
        )
    parallel = replace(cfg.parallel, data=cfg.parallel.data_size(devices))
    few = isinstance(cfg.optimizer, SGDConfig | LionConfig)
    return Description(
        model=cfg.model,
        parallel=parallel,
        device=device,
        per_node=per_node or device.per_node,
        global_size=cfg.batch.global_size,
        micro_size=cfg.batch.micro_size,
        compute=cfg.precision.compute if cfg.precision.fp8 is None else "fp8",
        gradients=cfg.precision.gradients,
        reduce=cfg.precision.reduce,
        moments=1 if few else 2,
        moment_bytes=BYTES[cfg.optimizer.moments],
        moments_away=cfg.optimizer.offload,
        steps=cfg.steps,
    )
