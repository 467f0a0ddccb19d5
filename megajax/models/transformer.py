"""Base classes for configs of models with one width; importing this imports neither jax nor flax."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, Literal, Self

from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.layers.block.config import BlockConfig
from megajax.layers.facts import LayerBuilder, Mixer, Side, SupportsContext, prefixed
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.norm.config import NormConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.recompute import Part, Recompute, Recomputing, format_recompute
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import SIZED_AXES, ParallelConfig
from megajax.models.facts import ParameterCount, SectionFacts, count_parameters


class AdaptedConfig(Builds):
    """Base of the configs of models that may have low-rank adapters and quantized weights; every subclass is a
    dataclass with these fields."""

    lora: LoRAConfig | None
    quantization: QuantizationConfig | None

    def build(self, layout: Any) -> Any:
        """The module on this layout, with adapters and quantized matrices."""
        model = super().build(layout)
        model = model if self.lora is None else self.lora.build(model)
        return model if self.quantization is None else self.quantization.build(model)

    def drops_inputs(self) -> bool:
        """Whether adapters have dropout."""
        return self.lora is not None and self.lora.dropout > 0


class TransformerConfig:
    """Facts and checks of stacks of blocks with one width; every subclass is a dataclass with these fields.

    A composite names its parts in `towers`, and the methods of this class add the facts, checks and kernels of the
    parts to those of its own layers.
    """

    frozen: ClassVar[tuple[str, ...]] = ()
    """Towers that are never trained, such as a teacher."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    hidden: int
    stack: StackConfig | SegmentsConfig
    norm: NormConfig | LayerBuilder
    dropout: float
    residual: Literal["compute", "float32"]
    recompute: Recompute
    recompute_layers: int | None
    layers_per_checkpoint: int
    offload: tuple[Part, ...]
    unroll: int | None

    def positions(self) -> int:
        """Positions in a row, as attention sees them."""
        raise NotImplementedError

    def towers(self) -> Mapping[str, "TransformerConfig"]:
        """Setting -> config of each transformer that is a part of this one, in the order in which they run.

        The module has it under the same name. Settings, paths and messages of a tower begin with the name.
        """
        return {}

    def never_trained(self) -> tuple[str, ...]:
        """The weights of frozen towers."""
        return tuple(f"{name}.*" for name in self.frozen)

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The layers of each section, by its path in the model: those of towers, then its own."""
        below = {name: tower.stacks() for name, tower in self.towers().items()}
        towers = {_below(name, path): stack for name, stacks in below.items() for path, stack in stacks.items()}
        return towers | {name.removeprefix("stack"): stack for name, stack in self.named_stacks().items()}

    def named_blocks(self) -> dict[str, BlockConfig]:
        """Setting -> block, for each block in the config outside towers."""
        stacks = self.named_stacks().items()
        return {f"{name}.{setting}": block for name, stack in stacks for setting, block in stack.named_blocks().items()}

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The sections of towers, by their paths and weights in this model."""
        return tuple(
            replace(
                section,
                path=_below(name, section.path),
                weights=prefixed(name, section.weights),
                frozen=name in self.frozen,
            )
            for name, tower in self.towers().items()
            for section in tower.section_facts()
        )

    def own_mixers(self, *below: str) -> dict[str, Any]:
        """Setting -> config of each mixer that reads its block's own sequence. below: its settings; default: all."""
        blocks = {setting: block for setting, block in self.named_blocks().items() if setting.startswith(below or "")}
        return {
            f"{setting}.{name}": mixer
            for setting, block in blocks.items()
            for name, mixer in block.own_mixers().items()
        }

    def causality(self, *below: str) -> dict[str, bool | None]:
        """Setting -> `causal` of each mixer; None for mixers without this setting, which never see later positions.

        below: as in `own_mixers`.
        """
        return {setting: getattr(mixer, "causal", None) for setting, mixer in self.own_mixers(*below).items()}

    def hiding_problems(self, message: str, *below: str) -> list[Problem]:
        """A problem for each causal mixer of an encoder. message: what it hides; below: as in `own_mixers`."""
        causal = [setting for setting, causal in self.causality(*below).items() if causal]
        return [Problem(f"{setting}.causal", message, "set it to false") for setting in causal]

    def mixers_of_whole_rows(self) -> dict[str, Any]:
        """Setting -> config of each mixer that needs whole rows on a device."""
        return {
            setting: mixer
            for setting, mixer in self.own_mixers().items()
            if not (isinstance(mixer, SupportsContext) and mixer.allows_context())
        }

    def has_dropout(self) -> bool:
        """Whether training draws random numbers. Frozen towers do not."""
        trained = (tower for name, tower in self.towers().items() if name not in self.frozen)
        blocks = (block for stack in self.named_stacks().values() for block in stack.pattern)
        return self.dropout > 0 or any(part.has_dropout() for parts in (blocks, trained) for part in parts)

    def shape_problems(self) -> list[Problem]:
        """Problems of the mixers with the length and width of rows."""
        problems = []
        for setting, block in self.named_blocks().items():
            for part, mixer in block.mixers().items():
                if isinstance(mixer, Mixer):
                    for problem in mixer.shape_problems(hidden=self.hidden, length=self.length_of(setting)):
                        problems.append(Problem(f"{setting}.{part}.{problem.setting}", problem.message, problem.hint))
        return problems

    def recompute_problems(self) -> list[Problem]:
        names = {"layers": "recompute_layers"}
        problems = [replace(p, setting=names.get(p.setting, p.setting)) for p in self.recomputing().problems()]
        size = len(self.stack.pattern)
        if len(self.stack.parts()) > 1:
            if self.layers_per_checkpoint > 1:
                message = f"must be 1 for a stack of segments, got {self.layers_per_checkpoint}"
                problems.append(Problem("layers_per_checkpoint", message, "use 1"))
            if self.recompute_layers is not None:
                message = f"must be none for a stack of segments, got {self.recompute_layers}"
                problems.append(Problem("recompute_layers", message, "use none"))
            return problems
        for name, count in (
            ("recompute_layers", self.recompute_layers),
            ("layers_per_checkpoint", self.layers_per_checkpoint if self.layers_per_checkpoint > 1 else None),
        ):
            if size and count is not None and count % size:
                message = f"{count} cuts the stack's pattern of {size} blocks"
                problems.append(Problem(name, message, f"use a multiple of {size}"))
        return problems

    def recomputing(self) -> Recomputing:
        """The recompute settings."""
        return Recomputing(
            recompute=self.recompute,
            layers=self.recompute_layers,
            layers_per_checkpoint=self.layers_per_checkpoint,
            offload=self.offload,
        )

    def with_recomputing(self, recomputing: Recomputing) -> Self:
        """A copy with these recompute settings."""
        return replace(
            self,
            recompute=recomputing.recompute,
            recompute_layers=recomputing.layers,
            layers_per_checkpoint=recomputing.layers_per_checkpoint,
            offload=recomputing.offload,
        )

    def parameter_count(self) -> ParameterCount:
        """Number of weights. Raises UserError if a layer has no facts."""
        return count_parameters(self)

    def kernel_choices(self, request: KernelRequest, device: KernelDevice | None) -> tuple[KernelChoice[str], ...]:
        """The kernel of each layer that has one, and why faster ones were not chosen. device: None for any NVIDIA GPU.

        request: facts of the run. Raises UserError for a kernel chosen by name that is not available.
        """
        choices = []
        for name, stack in self.named_stacks().items():
            rows = self.known_rows(name, request)
            # The first of equal blocks.
            settings = {block: setting for setting, block in reversed(stack.named_blocks().items())}
            for block in stack.pattern:
                for part, layer in block.with_kernels().items():
                    setting = f"model.{name}.{settings[block]}.{part}.kernel"
                    choice = layer.kernel_choice(self.hidden, rows, device, setting)
                    choices.append(choice._replace(place=choice.place or self.attention_name(name, part)))
        for name, tower in self.towers().items():
            for choice in tower.kernel_choices(request, device):
                choices.append(choice._replace(place=f"{name} {choice.place or 'self-attention'}"))
        return tuple(choices)

    def with_kernels(self, names: Iterable[str]) -> Self:
        """A copy with these kernels, one for each of `kernel_choices`."""
        remaining, stacks = iter(names), {}
        for name, stack in self.named_stacks().items():
            blocks = []
            for block in stack.pattern:
                layers = block.with_kernels().items()
                blocks.append(replace(block, **{part: layer.with_kernel(next(remaining)) for part, layer in layers}))
            stacks[name] = stack.with_pattern(blocks)
        towers = {name: tower.with_kernels(remaining) for name, tower in self.towers().items()}
        return replace(self, **stacks, **towers)

    def named_stacks(self) -> dict[str, StackConfig | SegmentsConfig]:
        """Setting -> stack of each section."""
        return {"stack": self.stack}

    def length_of(self, setting: str) -> int:
        """Positions in a row of these layers. setting: begins with a name in `named_stacks`."""
        del setting
        return self.positions()

    def known_rows(self, stack: str, request: KernelRequest) -> KernelRequest:
        """The request with the facts of this stack's rows. stack: a name in `named_stacks`."""
        padded = self.pads_rows()
        documents = request.documents and not padded
        return replace(request, length=self.length_of(stack), documents=documents, padded=padded)

    def attention_name(self, stack: str, part: str) -> str:
        """Name in the banner for this part of a stack's blocks; "" for a model with one kind of attention."""
        del stack, part
        return "decoder self-attention" if self.towers() else ""

    def pads_rows(self) -> bool:
        """Whether `segment_ids` separate a text from the padding after it, rather than documents from each other."""
        return False

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """Sizes that the mesh does not divide, and recompute settings that it does not allow."""
        sizes = {axis: getattr(parallel, axis) or 1 for axis in SIZED_AXES}
        tensor_shards = sizes["tensor"] if parallel.expert_tensor == "whole" else 1
        sizes |= {"experts": sizes["expert"] * tensor_shards, "expert_mlp": sizes["tensor"] // tensor_shards}
        ring = sizes["context"] // parallel.exchanging() if "ring" in parallel.context_strategy else 1
        sizes |= {"exchanging": parallel.exchanging(), "ring": ring}
        yield from self.mesh_problems(sizes, sequence=parallel.sequence)
        yield from self._group_problems(parallel)
        for name, tower in self.towers().items():
            for problem in tower.parallel_problems(parallel, shards):
                yield replace(problem, setting=f"{name}.{problem.setting}")
        if parallel.data_sharding == "fsdp" and self.recomputing().keeps_all():
            yield Problem(
                "recompute",
                f"{format_recompute(self.recompute)} with parallel.data_sharding=fsdp would save gathered weights "
                "of every layer for the backward pass",
                "use recompute=selective or full for all layers, or data_sharding=zero1",
            )
        if shards is not None and parallel.data_sharding != "replicate" and self.hidden % shards:
            yield Problem(
                "hidden",
                f"parallel.data_sharding={parallel.data_sharding} shards hidden={self.hidden} over {shards} "
                "data-parallel devices, which do not divide it",
                "use data_sharding=replicate or another parallel.data or parallel.shards",
            )

    def _group_problems(self, parallel: ParallelConfig) -> Iterator[Problem]:
        """Layers of one checkpoint must be in one chunk of a stage, and chunks must be alike."""
        group, size, repeats = self.layers_per_checkpoint, len(self.stack.pattern), self.stack.repeats
        if group < 2 or not size or group % size or parallel.problems() or parallel.chunks() > repeats:
            return
        chunks = parallel.layers or tuple(
            repeats // parallel.chunks() + (chunk < repeats % parallel.chunks()) for chunk in range(parallel.chunks())
        )
        counts = {min(count * size, self.recompute_layers or count * size) for count in chunks}
        if len(set(chunks)) > 1 or any(count % group for count in counts):
            layers = " and ".join(str(count * size) for count in sorted(set(chunks)))
            yield Problem(
                "layers_per_checkpoint",
                f"{group} does not divide the layers that are recomputed, {' or '.join(map(str, sorted(counts)))} of "
                f"the {layers} layers of each chunk of a stage",
                "chunks must be alike, and hold a multiple of it",
            )

    def matmul_sides(self, tensor: int) -> Iterator[Side]:
        """Sides of the matrices of all layers on one device."""
        yield Side("hidden", "is", self.hidden)
        for name, stack in self.named_stacks().items():
            for setting, block in stack.named_blocks().items():
                for side in block.matmul_sides(self.hidden, tensor):
                    yield side._replace(setting=f"{name}.{setting}.{side.setting}")
        for name, tower in self.towers().items():
            for side in tower.matmul_sides(tensor):
                yield side._replace(setting=f"{name}.{side.setting}")

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """The tower's way with its weights, from a model with the same tower or from the tower as a model."""
        name, _, inside = path.partition(".")
        tower, prefix = self.towers().get(name), f"model.{name}."
        inner = {key.replace(prefix, "model."): value for key, value in settings.items() if key.startswith(prefix)}
        return None if tower is None else tower.refit(inside, weight, inner or settings)

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """Problems of the blocks on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        del sequence
        if max(sizes["tensor"], sizes["expert"], sizes["context"]) > 1:
            for setting, block in self.named_blocks().items():
                for problem in block.mesh_problems(sizes):
                    yield replace(problem, setting=f"{setting}.{problem.setting}")


def settings_of(model: "TransformerConfig", cls: "type[TransformerConfig] | None" = None) -> dict[str, Any]:
    """The settings of a model by name; cls: those that this base of its class has. For a model of another class."""
    return {field.name: getattr(model, field.name) for field in fields(cls or type(model))}


def _below(name: str, path: str) -> str:
    """A path of a tower, in the model."""
    return f"{name}.{path}".rstrip(".")
