"""What training, pipeline, evaluation and planning ask of a model. They know no model beyond these questions.

A model is two things in a user's file or in this folder: a config (`ModelConfig`), which says without jax which arrays
a row has, and a module (`Model`), which computes. docs/own_model.md builds one of each.

Shapes: B rows, and whatever a model makes of them.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from megajax.batch import Array, Loss, Rows, Schema
from megajax.config.errors import Problem, UserError, demand_members
from megajax.kernels.paged_capability import PagedRequest
from megajax.layers.cache_facts import CacheLeaf
from megajax.layers.config import StackConfig
from megajax.layers.segments import SegmentsConfig
from megajax.mesh.config import ParallelConfig


class ModelConfig(Protocol):
    """Base of the configs of models. A model of your own has `stack`, `schema` and `build`; the rest has defaults."""

    __slots__ = ()

    stack: StackConfig | SegmentsConfig
    """The layers, which pipelines cut into stages; a field of the config, which may be frozen. Of several sections the
    last one's."""

    @abstractmethod
    def build(self, layout: Any) -> Any:
        """The module (`Model`) on this `megajax.mesh.layout.Layout`; its values are made elsewhere."""
        ...

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The layers of each section, by its path in the model."""
        return {"": self.stack}

    @abstractmethod
    def schema(self) -> Schema:
        """The leaves of a row that the model reads."""
        ...

    def problems(self) -> list[Problem]:
        """What is wrong with the settings of the model itself."""
        return []

    def row_positions(self) -> int:
        """Positions of a row: what throughput is counted in, and what a loss is averaged over. 1 without a sequence."""
        return max((leaf.positions() for leaf in self.schema().values()), default=1)

    def width_ratio(self) -> float:
        """How much wider this model is than the one its learning rates were found on (muP); 1 for none."""
        return 1.0

    def ignores_later_positions(self) -> bool:
        """Whether what stands behind a position never changes what `Model.__call__` gives for it, as in causal models.

        Then a row may be padded at its end.
        """
        return False

    def allows_context(self) -> bool:
        """Whether devices may hold parts of rows (`parallel.context`).

        Then everything that looks along a row reads `Context.index`, or is attention of megajax.layers.
        """
        return False

    def cache_leaves(self, tensor: int) -> tuple[CacheLeaf, ...]:
        """What layers keep of earlier tokens while text is generated, by block: "0.mixer.key".

        tensor: devices that share the heads. Raises UserError for a model that does not generate.
        """
        del tensor
        raise UserError(f"{type(self).__name__} does not generate text: see docs/inference.md")

    def paged_requests(self, request: PagedRequest) -> tuple[PagedRequest, ...]:
        """The requests of its layers to a kernel of a paged cache, with their own settings."""
        del request
        return ()

    def memory_length(self) -> int:
        """Most tokens that the section before the last one reads of a row, where text is generated from them; 0: none.

        The module then has `remember`, see `RememberingModel`.
        """
        return 0

    def sampler(self) -> str | None:
        """What shows the work of a trained model: a name in `megajax.inference.sample.SAMPLERS`; none: nothing.

        Or "module:function" of your own: (run, folder) -> a text to print; it may leave pictures in the folder.
        """
        return None

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """A weight of another run, for this model; None where it does not fit. Only asked for other shapes.

        path: in this model; weight: float32 numpy array; settings: of that run, by names such as model.height.
        """
        del path, weight, settings
        return None

    def derived(self, path: str, stored: Mapping[str, tuple[int, ...]]) -> Any | None:
        """How a weight that another run lacks is made from one it has, a `megajax.layers.upcycling.Derived`; None: it
        is not. By default layers say so whose configs have `derived(name, shapes by name)`.

        path: in this model; stored: shapes of the other run's weights, by path.
        """
        for section, stack in self.stacks().items():
            before = f"{section}.stack.blocks." if section else "stack.blocks."
            number, _, inside = path.removeprefix(before).partition(".")
            if not path.startswith(before) or not inside:
                continue
            place, _, name = inside.partition(".")
            layer = getattr(stack.stored()[int(number)][0], place, None)
            if not hasattr(layer, "derived"):
                return None
            before = f"{before}{number}.{place}."
            inner = {full.removeprefix(before): shape for full, shape in stored.items() if full.startswith(before)}
            derived = layer.derived(name, inner)
            return derived and replace(derived, source=derived.source and before + derived.source)
        return None

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """What does not fit these settings. shards: devices that ZeRO and FSDP spread a weight over, if known."""
        yield from ()


def ids_below(model: ModelConfig) -> int | None:
    """Size of the vocabulary of a model that reads tokens; None for others."""
    tokens = model.schema().get("tokens")
    return None if tokens is None else tokens.below


def demand_causal(model: ModelConfig, prefix: str = "") -> None:
    """Raises UserError, beginning with `prefix`, for a model without probabilities of next tokens."""
    if not model.ignores_later_positions() or "tokens" not in model.schema():
        raise UserError(
            f"{prefix}{type(model).__name__} is not a causal language model, and tasks are for causal language models: "
            "its validation loss is what it has"
        )


def position_unit(model: ModelConfig) -> Literal["tokens", "positions", "rows"]:
    """What `row_positions` counts: tokens where the model reads them, else positions of a sequence, or whole rows."""
    if ids_below(model) is not None:
        return "tokens"
    return "positions" if any("seq" in leaf.axes for leaf in model.schema().values()) else "rows"


class Section(Protocol):
    """One tower: a way in and a stack of layers."""

    stack: Any
    """A `megajax.layers.stack.Stack`."""

    def context(self, batch: Rows, key: Array | None) -> Any:
        """What layers know of a microbatch besides activations. key: of the run, None for a deterministic forward."""
        ...

    def embed(self, batch: Rows) -> Array:
        """The start of the way in, made by all stages of a pipeline together: its tables may be cut over stages.

        Its result is the same on all stages, and so is its cotangent.
        """
        ...

    def enter(self, x: Array, ctx: Any) -> Array:
        """The rest of the way in, from `embed`'s result to the input of the first layer."""
        ...


class EarlierSection(Section, Protocol):
    """A section before the last."""

    def leave(self, x: Array, ctx: Any) -> Array:
        """What the next section reads, from the output of the layers.

        The next section and its layers find it as `ctx.memory`, a field that its context must have then.
        """
        ...


class Model(Protocol):
    """An nnx.Module whose weights are made by `megajax.layers.param.param`."""

    sections: Mapping[str, Section]
    """By path in the model, "" for itself, in the order in which they run; all but the last are `EarlierSection`s."""

    def loss(self, x: Array, batch: Rows, ctx: Any, reduction: Any) -> Loss:
        """From the last section's output on.

        In a pipeline all stages call it with the same x, and the gradients that they make are added up: each gets its
        share of the cotangent, so that what is not cut over stages needs no care.
        """
        ...

    def __call__(self, *arrays: Array) -> Array:
        """Plain use by `jax.jit`, as in a notebook; the arguments have the names of leaves."""
        ...


class ScoringModel(Model, Protocol):
    """A causal language model that evaluation can ask for the probabilities of tokens."""

    def scores(self, x: Array, labels: Array) -> tuple[Array, Array]:
        """Log-probability of each label, float32 [B, S], and the likeliest token, int32 [B, S].

        x: from the last section's output on, as for `loss`; labels int32 [B, S]. Called by all stages of a pipeline
        with the same x; the results are the same on all.
        """
        ...


class GeneratingModel(Model, Protocol):
    """A model that generates text with a cache of earlier tokens."""

    def step(self, tokens: Array, cache: Mapping[str, Array], ctx: Any) -> tuple[Array, Mapping[str, Array]]:
        """The tokens of a decoding step, int32 [T, 1] -> the last section's output [T, 1, D], and the cache.

        ctx: a `megajax.layers.context.Context` with positions and `rows`.
        """
        ...

    def next_logits(self, x: Array) -> Array:
        """That output -> logits of the next token, float32 [T, 1, V], laid out (batch, seq, vocab).

        V: the vocabulary with padding, which every number of devices along `vocab` divides.
        """
        ...


class PredictingModel(Model, Protocol):
    """A model that evaluation can ask for what it predicts of whole rows, such as their classes."""

    def outputs(self, x: Array, batch: Rows, ctx: Any) -> Mapping[str, Array]:
        """Float32 arrays [B, ...] by name, a row's own in each row, from the last section's output on, as for `loss`.

        Called by all stages of a pipeline with the same x; the results are the same on all.
        """
        ...


class RememberingModel(GeneratingModel, Protocol):
    """One whose layers read what an earlier section makes of another text, as decoders read an encoder."""

    def remember(self, tokens: Array, cache: Mapping[str, Array], ctx: Any) -> Mapping[str, Array]:
        """The texts of some rows, int32 [R, L] -> the cache, with what the layers read of them in the rows' slots.

        ctx: a `megajax.layers.context.Context` whose `rows` has one group, of R rows with L tokens each.
        """
        ...


NEEDED = ("context", "embed", "enter", "stack")
"""Of a section; one before the last also has `leave`."""


def demand_model(model: Any) -> None:
    """Raises UserError for a module that lacks what training asks of a `Model`."""
    module = type(model).__name__
    hint = "training asks for it: see docs/own_model.md"
    demand_members(model, ("sections", "loss"), module, hint)
    if not isinstance(model.sections, Mapping) or not model.sections:
        raise UserError(f'{module}.sections must be a mapping from path to section, such as {{"": self}}')
    *inner, last = model.sections.items()
    for path, section in [*inner, last]:
        needed = NEEDED if path == last[0] else (*NEEDED, "leave")
        owner = f"the section {path!r} of {module}" if path else module
        demand_members(section, needed, owner, hint)
