"""The protocol of models: all that training, pipeline, evaluation and planning use of a model.

A model has two classes, in a user's file or in this folder: a config (`ModelConfig`), which describes the arrays of a
row without jax, and a module (`Model`), which computes. docs/own_model.md builds both.

Shapes: B rows; other dimensions depend on the model.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from megajax.batch import Array, Loss, Rows, Schema
from megajax.config.errors import Problem, UserError, demand_members
from megajax.kernels.paged.capability import PagedRequest
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig


class ModelConfig(Protocol):
    """Base of model configs. Your own model needs `stack`, `schema` and `build`; the other methods have defaults."""

    stack: StackConfig | SegmentsConfig
    """The layers, which pipelines split into stages; a field of the config, which may be frozen. With several sections:
    those of the last one."""
    lora: LoRAConfig | None = None
    """Low-rank adapters, which are trained in place of the weights below them."""

    @abstractmethod
    def build(self, layout: Any) -> Any:
        """The module (`Model`) on this `megajax.mesh.layout.Layout`; weights are initialised elsewhere."""
        ...

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The layers of each section, by its path in the model."""
        return {"": self.stack}

    @abstractmethod
    def schema(self) -> Schema:
        """The leaves of a row that the model reads."""
        ...

    def problems(self) -> list[Problem]:
        """Problems of the settings of the model."""
        return []

    def row_positions(self) -> int:
        """Positions of a row, the unit of throughput and of the loss average. 1 without a sequence."""
        return max((leaf.positions() for leaf in self.schema().values()), default=1)

    def width_ratio(self) -> float:
        """Width of this model over that of the muP base model; 1 without muP."""
        return 1.0

    def first_loss(self) -> str | None:
        """The expected loss of the first step, for the banner; "": unknown; None: that of equally likely ids."""
        return None

    def never_trained(self) -> tuple[str, ...]:
        """Patterns of the paths of weights that are never trained, such as a teacher's; * for any text."""
        return ()

    def ignores_later_positions(self) -> bool:
        """Whether later positions never change the output of `Model.__call__` at a position, as in causal models.

        Then a row may be padded at its end.
        """
        return False

    def allows_context(self) -> bool:
        """Whether devices may hold parts of rows (`parallel.context`).

        If so, layers that mix positions use `Context.index`, or are attention layers of megajax.layers.
        """
        return False

    def cache_leaves(self, tensor: int, drafts: int = 0) -> tuple[CacheLeaf, ...]:
        """Cache leaves of the layers for text generation, by block: "0.mixer.key".

        tensor: devices that share the heads; drafts: most tokens of a draft. Raises UserError for a model that does not
        generate text, and for drafts if a layer can't take them back.
        """
        del tensor, drafts
        raise UserError(f"{type(self).__name__} does not generate text: see docs/inference.md")

    def paged_requests(self, request: PagedRequest) -> tuple[PagedRequest, ...]:
        """The requests of its layers to a kernel of a paged cache, with their own settings."""
        del request
        return ()

    def memory_length(self) -> int:
        """Maximum input tokens of the preceding section, if text is generated from its output; 0: no such section.

        If above 0, the module has `remember`, see `RememberingModel`.
        """
        return 0

    def text_encoder(self) -> "ModelConfig | None":
        """A model of the same weights, but the heads, that gives embeddings of texts: its module is a
        `TextEncodingModel`. None for others, such as models that generate text."""
        return None

    def sampler(self) -> str | None:
        """Sample output of a trained model: a name in `megajax.tasks.end_of_run_samples.SAMPLERS`; None: no sample.

        Or "module:function" of your own: (run, its folder) -> a text to print.
        """
        return None

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """A weight of another run, converted to the shape in this model; None if that is not possible.

        path: in this model; weight: float32 numpy array; settings: of that run, by names such as model.height.
        """
        del path, weight, settings
        return None

    def derived(self, path: str, stored: Mapping[str, tuple[int, ...]]) -> Any | None:
        """How to derive a weight that another run lacks, a `layers.moe.upcycling.Derived`; None: not possible.

        By default, layer configs with `derived(name, shapes by name)` decide.

        path: in this model; stored: shapes of the other run's weights, by path.
        """
        for section, stack in self.stacks().items():
            before = f"{section}.stack.blocks." if section else "stack.blocks."
            number, _, inside = path.removeprefix(before).partition(".")
            if not path.startswith(before) or not inside:
                continue
            place, _, name = inside.partition(".")
            layer = stack.stored()[int(number)][0].layers().get(place)
            if not hasattr(layer, "derived"):
                return None
            before = f"{before}{number}.{place}."
            inner = {full.removeprefix(before): shape for full, shape in stored.items() if full.startswith(before)}
            derived = layer.derived(name, inner)
            return derived and replace(derived, source=derived.source and before + derived.source)
        return None

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """Problems of the model with these settings. shards: devices of ZeRO and FSDP, if known."""
        yield from ()


def ids_below(model: ModelConfig) -> int | None:
    """Size of the vocabulary of a model that reads tokens; None for others."""
    tokens = model.schema().get("tokens")
    return None if tokens is None else tokens.below


def demand_causal(model: ModelConfig, prefix: str = "") -> None:
    """Raises UserError, beginning with `prefix`, for a model without probabilities of next tokens."""
    if not model.ignores_later_positions() or "tokens" not in model.schema():
        raise UserError(
            f"{prefix}{type(model).__name__} is not a causal language model, which tasks require: "
            "evaluate its validation loss instead"
        )


def position_unit(model: ModelConfig) -> Literal["tokens", "positions", "rows"]:
    """Unit of `row_positions`: tokens if the model reads them, else positions of a sequence, else rows."""
    if ids_below(model) is not None:
        return "tokens"
    return "positions" if any("seq" in leaf.axes for leaf in model.schema().values()) else "rows"


class Section[C](Protocol):
    """A tower: input layers and a stack of layers, with a context of class C."""

    stack: Any
    """A `megajax.layers.stack.stack.Stack`."""

    def context(self, batch: Rows, key: Array | None) -> C:
        """Context of the layers for a microbatch. key: random key of the run, None for a deterministic forward pass."""
        ...

    def embed(self, batch: Rows) -> Array:
        """First part of the input layers, computed by all pipeline stages: its tables may be sharded over stages.

        Its result and its cotangent are the same on all stages.
        """
        ...

    def enter(self, x: Array, ctx: C) -> Array:
        """Rest of the input layers: result of `embed` -> input of the first layer."""
        ...


class EarlierSection[C](Section[C], Protocol):
    """A section before the last."""

    def leave(self, x: Array, ctx: C) -> Array:
        """Output of the layers -> input of the next section.

        The next section and its layers read it as `ctx.memory`; its context must have this field.
        """
        ...


class Model[C](Protocol):
    """An nnx.Module with weights declared by `megajax.layers.param.param`."""

    sections: Mapping[str, Section]
    """Sections by path in the model ("": the model itself), in order; all but the last are `EarlierSection`s."""

    def loss(self, x: Array, batch: Rows, ctx: C, reduction: Any) -> Loss:
        """Loss from the output x of the last section.

        In a pipeline all stages call it with the same x, and their gradients are added up: each stage gets a share of
        the cotangent, so computation that is not sharded over stages needs no special treatment.
        """
        ...

    def __call__(self, *arrays: Array) -> Array:
        """Forward pass under plain `jax.jit`, as in a notebook; the arguments are named like leaves."""
        ...


class ScoringModel(Model, Protocol):
    """A causal language model with token probabilities for evaluation."""

    def scores(self, x: Array, labels: Array, temperature: float = 1.0) -> tuple[Array, Array]:
        """Log-probability of each label, float32 [B, S], and the likeliest token, int32 [B, S].

        x: output of the last section, as for `loss`; labels int32 [B, S]; temperature: divisor of the logits. All
        pipeline stages call it with the same x and get the same results.
        """
        ...


class GeneratingModel[C](Model[C], Protocol):
    """A model that generates text with a cache of earlier tokens."""

    def step(self, tokens: Array, cache: Mapping[str, Array], ctx: C) -> tuple[Array, Mapping[str, Array]]:
        """The tokens of a decoding step, int32 [T, 1] -> the last section's output [T, 1, D], and the cache.

        ctx: a `megajax.layers.context.Context` with positions and `rows`.
        """
        ...

    def final_norm(self, x: Array) -> Array:
        """Output x of `step` -> normalised, [T, 1, D]."""
        ...

    def next_logits(self, x: Array) -> Array:
        """Output x of `step` -> logits of the next token, float32 [T, 1, V], laid out (batch, seq, vocab).

        V: the vocabulary with padding, which every number of devices along `vocab` divides.
        """
        ...


class PredictingModel[C](Model[C], Protocol):
    """A model with predictions for whole rows, such as classes, for evaluation."""

    def outputs(self, x: Array, batch: Rows, ctx: C) -> Mapping[str, Array]:
        """Float32 arrays [B, ...] by name, one entry per row, from the output x of the last section, as for `loss`.

        All pipeline stages call it with the same x and get the same results.
        """
        ...


class RememberingModel[C](GeneratingModel[C], Protocol):
    """A generating model that reads the output of an earlier section, as a decoder reads an encoder."""

    def remember(self, tokens: Array, cache: Mapping[str, Array], ctx: C) -> Mapping[str, Array]:
        """Input texts of rows, int32 [R, L] -> the cache, with the state of these texts in the slots of the rows.

        ctx: a `megajax.layers.context.Context` whose `rows` has one group, of R rows with L tokens each.
        """
        ...


class TextEncodingModel(Model, Protocol):
    """A model that gives the states of whole texts."""

    def text_states(self, tokens: Array, segment_ids: Array) -> Array:
        """tokens int32 [B, S], segment_ids int32 [B, S], 0 for padding -> normalised states [B, S, D]."""
        ...


class ImageReadingModel(GeneratingModel, Protocol):
    """A generating model that reads images within its text: its leaf `images` has a `Placeholder`.

    `step` replaces tokens by the states that `Context.memory` and `Context.splice` give.
    """

    def image_states(self, images: Array, grids: Array) -> Array:
        """images uint8 [B, height, width, 3] -> states [B, positions of an image, D].

        With `Placeholder.patches`, images are uint8 [B, patches, pixels] with their rows and columns as grids int32
        [B, 2], which are zeros otherwise; the states are [B, positions, states * D].
        """
        ...


NEEDED = ("context", "embed", "enter", "stack")
"""Required members of a section; earlier sections also need `leave`."""


def demand_model(model: Any) -> None:
    """Raises UserError for a module that lacks members of `Model` that training needs."""
    module = type(model).__name__
    hint = "training needs it: see docs/own_model.md"
    demand_members(model, ("sections", "loss"), module, hint)
    if not isinstance(model.sections, Mapping) or not model.sections:
        raise UserError(f'{module}.sections must be a mapping from path to section, such as {{"": self}}')
    *inner, last = model.sections.items()
    for path, section in [*inner, last]:
        needed = NEEDED if path == last[0] else (*NEEDED, "leave")
        owner = f"the section {path!r} of {module}" if path else module
        demand_members(section, needed, owner, hint)


def last_output(sections: Mapping[str, Any], rows: Rows, key: Array | None = None) -> tuple[Array, Any]:
    """Output of the layers of the last section on a microbatch [B, ...], and their context.

    sections: of a `Model`; key: random key of the run, None for a deterministic forward pass. Not for differentiation:
    training differentiates section by section.
    """
    *earlier, last = sections.values()
    memory = None
    for section in earlier:
        x, ctx = _output(section, rows, key, memory)
        memory = section.leave(x, ctx)
    return _output(last, rows, key, memory)


def with_memory(ctx: Any, memory: Array | None) -> Any:
    """The context with the output of the preceding section."""
    return ctx if memory is None else ctx._replace(memory=memory)


def _output(section: Section, rows: Rows, key: Array | None, memory: Array | None) -> tuple[Array, Any]:
    ctx = with_memory(section.context(rows, key), memory)
    return section.stack(section.enter(section.embed(rows), ctx), ctx), ctx
