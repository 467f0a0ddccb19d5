"""The input of the cost model: a description of a run, made from a RunConfig or by hand.

benchmarks/planning/accuracy.py describes programs of other systems by hand, whose published speeds test the cost model.
Each row counts as one document: packed documents need less attention, and `context` divides it less evenly
(docs/attention.md).
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Literal

from megajax.config.errors import UserError
from megajax.layers.block.step_work import Training
from megajax.layers.expert_facts import ExpertSharding
from megajax.layers.facts import BlockFacts, MixerFacts, Share, Weight
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.recompute import SavePolicy
from megajax.mesh.config import ParallelConfig
from megajax.models.facts import Facts, HeadFacts, SectionFacts, block_facts, demand_facts, trained_share
from megajax.optim.config import AdamWConfig, LionConfig, MuonConfig, SGDConfig
from megajax.pipeline.closed_form import ClosedForm, closed_form, free_running
from megajax.planning.compiled.devices import OVERHEAD, Device
from megajax.precision.config import Fp8BlocksConfig, Fp8CurrentConfig, Mxfp8Config, Nvfp4Config
from megajax.processes.xla_options import XlaConfig
from megajax.training.run_config import RunConfig

type Compute = Literal["bfloat16", "float16", "float32", "fp8", "fp8_blocks", "mxfp8", "nvfp4"]

RECIPES = Fp8CurrentConfig, Fp8BlocksConfig, Mxfp8Config, Nvfp4Config
OPERANDS = {recipe.rate: recipe.saved_bytes for recipe in RECIPES}
"""Bytes of a number that a matmul saves, with its share of the scales, by the format of matmuls."""

CODE_SIDES = 128
"""Kernels of codes multiply matrices with sides of multiples of this on a device."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2} | dict.fromkeys(OPERANDS, 2)
"""Bytes of an element of activations, weights in use and gradients; only operands of matmuls are in fewer bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """How the programs of a training system differ from those of others."""

    name: str
    lockstep: bool = False
    """The stages of a pipeline run in ticks together, and all compute the loss, each with its part of the vocabulary.
    Otherwise a stage runs as soon as its input has arrived, and the last one computes the loss."""
    data_hidden: bool = True
    """Gathers of weights overlap the first microbatch's forward, reductions of gradients the last one's backward."""
    tensor_hidden: float | None = None
    """Share of the time of collectives over `tensor` that matmuls hide; None: as in compiled MegaJAX programs."""
    experts_hidden: float | None = None
    """Share of the time of exchanges of tokens with experts that other work hides; None: as in compiled MegaJAX
    programs."""
    experts_wait: float = 0.0
    """Seconds that a layer of experts and a microbatch wait for the host, which reads how many tokens each expert has
    and launches a kernel at a time, forward and backward together."""
    most_in_place: int | None = None
    """Chunks of a stage up to which matmuls use a layer's weights and gradient accumulators in place; None: always.
    With more, weights are copied out of their stack, and accumulators out and in."""
    xla: bool = False
    """Loops over layers copy a layer's saved tensors into a stacked array, and the inputs of attention out of it.
    Queries, keys, values, gate and up have separate matmuls; otherwise q, k and v are one matrix, and gate and up."""
    fused_loss: bool = True
    """The loss works on chunks of tokens; otherwise all logits go through memory several times."""
    narrow_experts: bool = True
    """Experts multiply in the format of the other matmuls on every device; otherwise only in fp8 on Hopper, and their
    rounded numbers in bfloat16 elsewhere."""
    one_pass: bool = True
    """One kernel reads numbers and writes the codes of both directions, as TransformerEngine's do; otherwise rounding
    takes as many bytes as in compiled MegaJAX programs."""
    tuned: bool = False
    """NVIDIA's own program."""
    overhead: float = 1.0
    """Factor on the time of matmuls and of memory-bound kernels, for an older or a newer generation of kernels."""


MEGAJAX = System(
    name="MegaJAX",
    lockstep=True,
    data_hidden=False,
    most_in_place=8,
    xla=True,
    narrow_experts=False,
    one_pass=False,
    overhead=OVERHEAD,
)
"""As counted in compiled programs (megajax.planning.cost.device_work); most_in_place is MOST_LOOPS of
pipeline.executor."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A run, as far as its speed and memory depend on it. Hashable."""

    model: Facts
    parallel: ParallelConfig
    """`data` is given. Its problems() are not asked."""
    device: Device
    per_node: int
    global_size: int
    micro_size: int = 1
    side_by_side: int = 1
    """Microbatches whose layers run in one loop."""
    compute: Compute = "bfloat16"
    rounded_once: bool = False
    """Matrices of experts are rounded once a step, others for each microbatch."""
    gradients: str = "float32"
    """Dtype in which gradients are accumulated over microbatches."""
    reduce: str | None = None
    """Dtype in which they are reduced over devices; None: as they were accumulated."""
    moment_bytes: int = 8
    """Bytes of the optimizer's moments per weight."""
    offload: float = 0.0
    """Share of the moments that is in host memory between updates."""
    trainable: tuple[str, ...] = ("*",)
    lora: LoRAConfig | None = None
    """Adapters; with them the default, *, of `trainable` stands for no weight."""
    memory_fraction: float = XlaConfig().memory_fraction
    """Share of the device's memory that the run reserves for arrays."""
    steps: int = 0
    """Steps of the run; 0: unknown."""
    system: System = MEGAJAX

    @property
    def sizes(self) -> dict[str, int]:
        return self.parallel.sizes(0)

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    @property
    def usable_gib(self) -> float:
        """Memory of a device for arrays."""
        return self.device.usable_gib(self.memory_fraction)

    @property
    def replicas(self) -> int:
        """Devices that work on different rows."""
        return self.parallel.replicas(1)

    @property
    def shards(self) -> int:
        """Devices that ZeRO and FSDP shard dense weights over."""
        return self.parallel.sharding_devices(1)

    @property
    def copies(self) -> int:
        """Devices that hold the same dense weights during the step, without FSDP; their gradients are summed."""
        return self.replicas * self.parallel.context

    @property
    def microbatches(self) -> int:
        return max(1, self.global_size // (self.micro_size * self.replicas))

    @property
    def step_tokens(self) -> int:
        """Positions of a step that throughput is counted in, all devices together."""
        return self.microbatches * self.micro_size * self.replicas * self.model.row_positions()

    @cached_property
    def schedule(self) -> ClosedForm:
        """Ticks, bubble and slots of the pipeline's schedule."""
        parallel = self.parallel
        sizes = {"stages": parallel.pipeline, "chunks": parallel.virtual_stages, "microbatches": self.microbatches}
        if parallel.pipeline == 1:  # no bubble
            return ClosedForm(Fraction(0), self.microbatches * parallel.virtual_stages, 0, (self.side_by_side,))
        if self.system.lockstep:
            return closed_form(parallel.schedule, **sizes, loss_wait=parallel.loss_wait)
        return free_running(**sizes)

    @property
    def in_place(self) -> bool:
        most = self.system.most_in_place
        return most is None or self.parallel.virtual_stages <= most

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return BYTES[self.compute]

    @property
    def reduced_width(self) -> int:
        """Bytes of an element of a gradient that is reduced over devices."""
        return BYTES[self.reduce or self.gradients]

    @property
    def sequence_shards(self) -> int:
        """Devices that cut the residual stream along the sequence."""
        return self.parallel.tensor if self.parallel.sequence else 1

    @property
    def dtype(self) -> str:
        """Dtype of what no recipe rounds: attention, the loss."""
        return "bfloat16" if self.compute in OPERANDS else self.compute

    def in_codes(self, *, experts: bool) -> bool:
        """Whether a kernel of codes multiplies, of this program: as in `megajax.precision.recipes.codes_of`."""
        if self.system.narrow_experts or self.compute not in OPERANDS or self.device.peak_fp8 is None:
            return False
        hopper = self.device.peak_fp4 is None
        return self.compute in ("fp8", "fp8_blocks")[not experts :] if hopper else experts

    @property
    def calls_codes(self) -> bool:
        """Whether a kernel of codes multiplies something of the model."""
        mixture = any(block.experts for tower in self.towers for block in tower.blocks)
        return self.in_codes(experts=False) or (mixture and self.in_codes(experts=True))

    def multiplied(self, sides: tuple[float, float], *, experts: bool) -> tuple[str, bool]:
        """What matmuls with weights of these sides on a device multiply, and whether by a kernel of codes."""
        codes = self.in_codes(experts=experts)
        if any(side % CODE_SIDES for side in sides) if codes else experts and not self.system.narrow_experts:
            return self.dtype, False
        return self.compute, codes

    @property
    def spread(self) -> ExpertSharding:
        return ExpertSharding.of(self.parallel)

    @cached_property
    def sections(self) -> tuple[SectionFacts, ...]:
        return self.model.section_facts()

    @cached_property
    def towers(self) -> tuple["Tower", ...]:
        """The segments of all sections, in the order in which they run; a pipeline has one."""
        towers = []
        for section in self.sections:
            before = 0
            for part in section.stack.parts():
                towers.append(Tower(self, replace(section, stack=part), section, before))
                before += part.layers()
        return tuple(towers)

    @cached_property
    def head(self) -> HeadFacts:
        return self.model.head_facts()

    @property
    def scored(self) -> int:
        """Positions of a microbatch whose loss a device of `context` computes."""
        return max(1, self.micro_size * self.head.positions // self.parallel.context)

    @property
    def columns(self) -> float:
        """Scores of a position on one device of `pipeline` and `tensor`."""
        return self.head.columns / (1 if self.head.replicated else self.parallel.pipeline * self.parallel.tensor)

    @cached_property
    def predicting_blocks(self) -> tuple[BlockFacts, ...]:
        """Blocks of multi-token prediction."""
        blocks = block_facts(self.towers[-1].section, self.head.ahead, self.dtype)
        return tuple(block.on(self.spread) for block in blocks)

    @property
    def predicting_experts(self) -> float:
        """Elements of these blocks that belong to experts, on a device during the step."""
        return sum(block.local_expert_size(self.parallel.tensor) for block in self.predicting_blocks)

    def held_tables(self, axis: str | None = None, *, trained: bool = False, head: bool = True) -> float:
        """Weights of the sections' tables and of the head on one device; axis: only of tables with this logical axis.

        trained: without frozen ones; head: with those of the head.
        """
        sections = (section for section in self.sections if not (trained and section.frozen))
        tables = [table for section in sections for table in section.tables] + [*self.head.tables] * head
        shards = self.parallel.tensor * self.parallel.pipeline
        return sum(
            table.size / (shards if "vocab" in table.axes else 1) * (self.trained((table,)) if trained else 1.0)
            for table in tables
            if axis is None or axis in table.axes
        )

    def trained(self, weights: tuple[Weight, ...], *, adapters: bool = True) -> float:
        """Share of these weights that is trained. adapters: theirs count as such."""
        return trained_share(weights, Training(self.trainable, self.lora), adapters=adapters)


@dataclass(frozen=True)
class Tower:
    """A segment of a section on one device."""

    run: Description
    section: SectionFacts
    """The section, with this segment as its stack."""
    unsplit: SectionFacts
    """The section with all its segments."""
    before: int
    """Layers of the segments before."""

    @property
    def hidden(self) -> int:
        return self.section.hidden

    @property
    def prefix(self) -> str:
        return f"{self.section.path}: " if self.section.path else ""

    @property
    def source_tokens(self) -> int:
        """Tokens of a microbatch, of the section before, that each layer reads on a device of `context`."""
        return self.run.micro_size * self.section.sequences * self.section.memory_length // self.run.parallel.context

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on each device of `context`."""
        return self.run.micro_size * self.section.positions // self.run.parallel.context

    @property
    def rows(self) -> float:
        """Repeats of the stack's pattern in a chunk of the pipeline; chunks with fewer are padded.

        Of several segments, their shares of a chunk: as if each chunk had layers of all kinds.
        """
        parallel, several = self.run.parallel, len(self.unsplit.stack.parts()) > 1
        layers = self.unsplit.stack.layers() if several else self.section.stack.repeats
        most = -(-layers // parallel.chunks())
        if parallel.layers is not None and parallel.pipeline > 1:
            most = max(parallel.layers)
        return most * self.section.stack.repeats / layers if several else most

    @property
    def repeats(self) -> float:
        """Repeats of the stack's pattern on a device."""
        return self.rows * self.run.parallel.virtual_stages

    @cached_property
    def held_rows(self) -> float:
        """Repeats of the pattern in a chunk that memory has room for.

        Chunks of several segments all hold as many layers of each kind as the one with most (pipeline.partition).
        """
        run, stack = self.run, self.unsplit.stack
        if len(stack.parts()) == 1 or run.parallel.pipeline == 1 or not run.system.lockstep:
            return self.rows
        base, longer = divmod(stack.layers(), run.parallel.chunks())
        sizes = run.parallel.layers or [base + (chunk < longer) for chunk in range(run.parallel.chunks())]
        bounds = [0, *accumulate(sizes)]
        shares = []
        for block, layers in stack.stored():
            if block in self.section.stack.pattern:
                starts = [bisect_left(layers, bound) for bound in bounds]
                shares.append(max(after - before for before, after in pairwise(starts)) / len(layers))
        return self.section.stack.repeats * max(shares)

    @property
    def held_repeats(self) -> float:
        """`held_rows` of all chunks of a device."""
        return self.held_rows * self.run.parallel.virtual_stages

    @property
    def policies(self) -> list[tuple[SavePolicy, float]]:
        """Save policies with their repeats on a device: layers beyond `layers` recompute one step less."""
        recomputing = self.section.recomputing
        most = len(self.section.stack.pattern) * self.rows
        share = 1.0 if recomputing.layers is None else min(1.0, recomputing.layers / most)
        lighter = [(recomputing.lighter_policy(), (1 - share) * self.repeats)] * (share < 1)
        return [(recomputing.policy(), share * self.repeats), *lighter]

    @cached_property
    def blocks(self) -> tuple[BlockFacts, ...]:
        blocks = block_facts(self.section, self.section.stack.pattern, self.run.dtype)
        return tuple(block.on(self.run.spread) for block in blocks)

    @cached_property
    def share(self) -> Share:
        """A device's part of a microbatch."""
        run, width = self.run, self.run.width
        residual = 4 if self.section.residual == "float32" else width
        sizes = {"tensor": run.parallel.tensor, "sequence": run.sequence_shards}
        operand = OPERANDS.get(run.compute)
        return Share(tokens=self.tokens, width=width, residual_width=residual, operand_width=operand, **sizes)

    @cached_property
    def attention_bytes(self) -> tuple[float, float, float]:
        """Queries, keys with values, and outputs on a device, of one repeat of the pattern and one microbatch.

        Only of full attention; keys with the copies of heads that devices exchange.
        """
        tensor, size = self.run.parallel.tensor, self.tokens * self.run.width
        mixers = [mixer.tensors for block in self.blocks for mixer in self.full_attention(block)]
        queries = sum(kernel.sharded / tensor for kernel, _ in mixers)
        outputs = sum(result.local(tensor) for _, result in mixers)
        return size * queries, size * sum(self.full_keys(block) for block in self.blocks), size * outputs

    def full_attention(self, block: BlockFacts) -> Iterator[MixerFacts]:
        """The mixers of a block whose keys are whole rows."""
        return (mixer for mixer in block.mixers if mixer.work.scores >= mixer.heads * self.section.length)

    def full_keys(self, block: BlockFacts) -> float:
        """Elements for each token of a block's keys and values on a device; see `attention_bytes`."""
        tensor, apart = self.run.parallel.tensor, self.run.parallel.exchanging()
        kernels = [mixer.tensors[0] for mixer in self.full_attention(block)]
        return sum(
            apart // gcd(apart, max(1, kernel.groups // tensor)) * (kernel.grouped / tensor + kernel.surplus(tensor))
            for kernel in kernels
        )

    @cached_property
    def matrices(self) -> float:
        """Elements of the stack's matrices on a device during the step; of fewer key-value heads than `tensor`, one."""
        return self.held_repeats * sum(block.local_size(self.run.parallel.tensor) for block in self.blocks)

    @cached_property
    def expert_matrices(self) -> float:
        """Elements of `matrices` that belong to experts."""
        return self.held_repeats * sum(block.local_expert_size(self.run.parallel.tensor) for block in self.blocks)

    @cached_property
    def unsharded(self) -> float:
        """Weights that neither ZeRO-1 nor FSDP shards."""
        return self.held_repeats * sum(block.unsharded.local(self.run.parallel.tensor) for block in self.blocks)

    @cached_property
    def vectors(self) -> float:
        """Norms and biases of the stack, whole on every device of `tensor`."""
        return self.held_repeats * sum(block.vectors for block in self.blocks)

    @cached_property
    def differentiated(self) -> bool:
        """Whether the backward pass reaches the section: it, or one before it, has trained weights."""
        towers = self.run.towers[: self.run.towers.index(self) + 1]
        sections = (tower for tower in towers if not tower.section.frozen)
        return any(tower.trained() + self.run.trained(tower.section.tables) > 0 for tower in sections)

    def trained(self, *, adapters: bool = True) -> float:
        """Share of the stack's weights that is trained. adapters: theirs count as such."""
        if self.section.frozen:
            return 0.0
        if self.run.trainable == ("*",) and self.run.lora is None:
            return 1.0
        layers = range(self.before, self.before + len(self.section.stack.pattern))
        weights = (weight for layer in layers for weight in self.unsplit.stack_weights(layer))
        return self.run.trained(tuple(weights), adapters=adapters)


def describe(cfg: RunConfig, device: Device, devices: int, per_node: int | None = None) -> Description:
    """The description of a config that passes its checks on this many devices.

    Raises UserError for a model or a layer without facts, and for an optimizer that is not one of the library's.
    """
    model, fsdp = demand_facts(cfg.model), cfg.parallel.data_sharding == "fsdp"
    single = isinstance(cfg.optimizer, SGDConfig | LionConfig)
    if not single and not isinstance(cfg.optimizer, AdamWConfig | MuonConfig):
        raise UserError(
            f"no formulas for the state of the optimizer {cfg.optimizer.name()}.\n"
            "Plan without --formula: the compiler needs none."
        )
    return Description(
        model=model,
        parallel=replace(cfg.parallel, data=cfg.parallel.data_size(devices)),
        device=device,
        per_node=per_node or device.per_node,
        global_size=cfg.batch.global_size,
        micro_size=cfg.batch.micro_size,
        side_by_side=cfg.batch.side_by_side,
        compute=cfg.precision.compute if cfg.precision.matmul is None else cfg.precision.matmul.rate,
        rounded_once=cfg.precision.matmul is not None and cfg.precision.matmul.once_a_step(fsdp=fsdp),
        gradients=cfg.precision.gradients,
        reduce=cfg.precision.reduce,
        moment_bytes=(1 if single else 2) * BYTES[cfg.optimizer.moments],
        offload=cfg.optimizer.offload,
        trainable=cfg.optimizer.trainable,
        lora=cfg.model.lora,
        memory_fraction=cfg.xla.memory_fraction,
        steps=cfg.steps,
    )
