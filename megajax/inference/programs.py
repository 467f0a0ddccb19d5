"""The compiled programs of an engine: steps of the model with its cache, and the choice of next tokens.

There is a model program for each bucket of shapes, and a small program for each chooser of tokens and number of rows,
which reads the logits of a step: a few compilations of the whole model serve all settings of requests. All of them can
be compiled before the first request.

The cache is a pool of blocks for tokens, and slots for rows. Each leaf that mixers declare
(`megajax.layers.cache_spec`) is one array for all layers that have it: of tokens [layers, blocks, block, ...], of rows
[layers, slots, ...]. Data-parallel replicas each have a part of the blocks and slots, and number them from 0.
"""

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.inference.images import (
    IMAGES,
    ImagePool,
    image_input,
    image_leaves,
    rotary_positions,
    state_index,
    written,
)
from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.inference.model_step import (
    STATES,
    TOKENS,
    Chooser,
    StateScorer,
    StepOutput,
    copied_states,
    known_tokens,
    of_layers,
    step_output,
    step_rows,
    with_chosen,
)
from megajax.inference.request import Announced, ImageInput, Sequence, Step
from megajax.inference.speculation.prediction_heads import PredictionHeads
from megajax.inference.step_arrays import (
    COPIES,
    Bucket,
    StepArrays,
    Texts,
    adapter_slots,
    bucket_for,
    chosen_slots,
    joined,
    lengths_up_to,
    like_arrays,
    pack,
    slot_pairs,
    starting_rows,
    texts_of,
)  # fmt: skip
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows
from megajax.layers.param import Adapter, specs


class Dispatched(NamedTuple):
    """A step of the model that was dispatched to the device."""

    bucket: Bucket
    slots: np.ndarray
    """int32 [replicas * bucket.rows]: the slots of its rows."""

    def row(self, replica: int, number: int) -> int:
        """The index of a row among the choices, by its index in `Step.parts`; those after its draft follow."""
        return self.bucket.choices * replica + self.bucket.width * number


class Programs:
    """The compiled programs of a model and the arrays of its cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        size: CacheSize,
        *,
        buckets: abc.Sequence[Bucket],
        choosers: abc.Sequence[Chooser],
        length: int,
        dtype: str,
        kernel: PagedKernel,
        heads: PredictionHeads | None = None,
    ):
        """length: maximum number of tokens of a row, prompt and answer; dtype: of the cache; heads: those that
        draft."""
        self.loaded, self.size, self.buckets = loaded.described(), size, tuple(buckets)
        self.length, self.kernel, self.heads = length, kernel, heads
        self.choosers = tuple(choosers)
        self.weights = dict(loaded.weights)
        """Those of `loaded`, with the adapters that were loaded since; empty while they are elsewhere."""
        self.replicas, self.images = loaded.replicas, image_input(loaded.cfg)
        self.leaves: tuple[CacheLeaf, ...] = (
            *loaded.cfg.cache_leaves(loaded.mesh.shape["tensor"], self.drafts),
            *image_leaves(loaded.cfg),
            TOKENS,
        )
        self._image_pool = None if self.images is None else ImagePool(self.images)
        self.width = -(-length // size.block)
        self.cache_like = loaded.like_cache(self.leaves, size, dtype)
        self.text_lengths = lengths_up_to(loaded.cfg.memory_length())
        self.compiled: dict[Any, jax.stages.Compiled] = {}
        """Steps by bucket; choosers with a bucket without prompts; scorers with their tokens; encoders by length."""
        self.announced: Announced = lambda name, arguments: nullcontext()
        self._output: StepOutput
        """Output of the last step, on the devices."""
        self._inputs: tuple[StepArrays, Any]
        """What the heads read of it."""
        self.following: Array | None = None
        """The drafts of the heads after the last step, int32 [R, K] as in `PredictionHeads`."""

    @cached_property
    def cache(self) -> Cache:
        """The arrays of the cache; created when first used, so that steps can be compiled without devices."""
        return {name: jnp.zeros(like.shape, like.dtype, device=like.sharding) for name, like in self.cache_like.items()}

    @cached_property
    def latest(self) -> Array:
        """int32 [replicas * slots]: the token that was last chosen for the row in each slot."""
        like = self.latest_like
        return jnp.zeros(like.shape, like.dtype, device=like.sharding)

    @property
    def latest_like(self) -> jax.ShapeDtypeStruct:
        return self.loaded.like(self.size.slots)

    @property
    def rows(self) -> int:
        """Maximum number of rows of a replica in a step."""
        return max(bucket.rows for bucket in self.buckets)

    @property
    def chunk(self) -> int:
        """Maximum number of prompt tokens in a step."""
        return max(bucket.chunk for bucket in self.buckets)

    @property
    def drafts(self) -> int:
        """Maximum number of tokens of a draft."""
        return max(bucket.drafts for bucket in self.buckets)

    @property
    def prefix_sharing(self) -> bool:
        """Whether rows may share blocks; if layers keep a state per row, only with snapshots of it."""
        return self.size.snapshots > 0 or all(leaf.per == "token" for leaf in self.leaves if leaf.name != IMAGES)

    @property
    def window(self) -> int | None:
        """Number of positions before a query that any layer reads; None: some layer reads all."""
        leaves = [*self.leaves, *(() if self.heads is None else self.heads.leaves)]
        windows = [leaf.window for leaf in leaves if leaf.per == "token" and leaf is not TOKENS]
        return None if None in windows else max((window for window in windows if window is not None), default=None)

    @property
    def tile(self) -> int:
        """Tokens of a tile of a prompt."""
        return max(bucket.tile for bucket in self.buckets)

    @property
    def count(self) -> int:
        """Programs that `compile` compiles."""
        return len(self._needed())

    def compile(self) -> Iterator[str]:
        """Compile all programs but scorers, which few requests need; yields the name of each after its compilation."""
        for number, (name, _) in enumerate(self._needed()):
            self._everywhere("compile", number)
            yield name
        # Created now, so that the first request does not wait for it or run out of memory.
        self._everywhere("allocate")

    def _needed(self) -> list[tuple[str, Callable[[], object]]]:
        """The name of each program that `compile` compiles, and how."""
        programs: list[tuple[str, Callable[[], object]]] = []
        programs += [(f"texts of {length} tokens", partial(self._encoder, length)) for length in self.text_lengths]
        programs += [(str(bucket), partial(self._step, bucket)) for bucket in self.buckets]
        for decoding, bucket in {bucket.without_prompts(): bucket for bucket in self.buckets}.items():
            programs += [
                (f"{chooser}, {decoding}", partial(self._choice, bucket, chooser)) for chooser in self.choosers
            ]
        if self.size.snapshots:
            programs.append(("copies of states", self._state_copier))
        if self.images is not None:
            programs.append(("images", partial(self._image_reader, self.images)))
        if self.loaded.adapters is not None:
            programs.append(("loading of adapters", self._adapter_writer))
        if self.heads is not None:
            programs += [(f"heads, {bucket}", partial(self._drafts, self.heads, bucket)) for bucket in self.buckets]
        return programs

    def _compiled(self, key: object, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """A program; compiled when first needed."""
        if key not in self.compiled:
            loaded = self.loaded
            with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
                self.compiled[key] = lower().compile(compiler_options=dict(loaded.options))
        return self.compiled[key]

    def _step(self, bucket: Bucket) -> jax.stages.Compiled:
        return self._compiled(bucket, lambda: self.lowered(bucket))

    def lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        """The lowered step of a bucket: (weights, cache, `latest`, StepArrays) -> (StepOutput, cache)."""
        loaded = self.loaded

        def step(weights: Params, cache: Cache, latest: Array, arrays: StepArrays) -> tuple[StepOutput, Cache]:
            arrays = arrays._replace(tokens=known_tokens(loaded.layout, arrays, latest, bucket))
            rows = step_rows(arrays, bucket.groups(), self.kernel, loaded)
            return step_output(loaded.bound(weights), loaded.layout, cache, arrays, rows, states=states)

        states = self.heads is not None
        # The programs that read the output are compiled for these layouts.
        axes = ("batch", "vocab"), ("batch", None), STATES, STATES if states else None
        out = StepOutput._make(None if leaf is None else loaded.sharding(*leaf) for leaf in axes)
        shardings = out, {name: leaf.sharding for name, leaf in self.cache_like.items()}
        with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
            jitted = jax.jit(step, donate_argnums=1, out_shardings=shardings)
            return jitted.lower(loaded.weights, self.cache_like, self.latest_like, self.like(bucket))

    def _choice(self, bucket: Bucket, chooser: Chooser) -> jax.stages.Compiled:
        """The program of a chooser, the same for all buckets with the same decoding rows: (logits, tokens, inputs,
        `latest`, slots of the rows) -> (output of the chooser, `latest` with the tokens after the rows)."""
        loaded, layout = self.loaded, self.loaded.layout

        def choose(logits: Array, tokens: Array, inputs: Any, latest: Array, slots: Array) -> tuple[Any, Array]:
            chosen = chooser(layout, logits, tokens, inputs)
            return chosen, with_chosen(layout, latest, slots, chosen.token, bucket)

        def lower() -> jax.stages.Lowered:
            (out, _), needed = self._step(bucket).out_info, chooser.like(bucket.choices)
            inputs = jax.tree.map(lambda leaf: loaded.like(*leaf.shape, dtype=leaf.dtype), needed)
            jitted = jax.jit(choose, out_shardings=(loaded.sharding(), self.latest_like.sharding))
            return jitted.lower(out.logits, out.tokens, inputs, self.latest_like, loaded.like(bucket.rows))

        return self._compiled((bucket.without_prompts(), chooser), lower)

    def _scores(self, bucket: Bucket, scorer: StateScorer) -> jax.stages.Compiled:
        """The program of a scorer."""
        loaded = self.loaded

        def score(weights: Params, states: Array, targets: Array) -> Any:
            return scorer(loaded.layout, loaded.bound(weights), states, targets)

        def lower() -> jax.stages.Lowered:
            prompts = self._step(bucket).out_info[0].prompts
            jitted = jax.jit(score, out_shardings=loaded.sharding())
            return jitted.lower(loaded.weights, prompts, loaded.like(bucket.chunk))

        return self._compiled((bucket.chunk, scorer), lower)

    def _drafts(self, heads: PredictionHeads, bucket: Bucket) -> jax.stages.Compiled:
        """The program of the heads after a step."""
        return self._compiled((bucket, "heads"), lambda: heads.lowered(bucket))

    def start(self, work: abc.Sequence[Step | None]) -> Dispatched:
        """Dispatch a step of each replica. The previous one must have been chosen."""
        starting = starting_rows(work) if self.text_lengths else None
        if starting is not None:
            self.encode_texts(starting)
        for copies in ([step.saves if step else () for step in work], [step.restores if step else () for step in work]):
            if any(copies):
                self._everywhere("copy", *slot_pairs(copies))
        bucket = bucket_for(work, self.buckets)
        arrays = joined([pack(step, bucket, block=self.size.block, width=self.width) for step in work])
        if self.loaded.adapters is not None:
            arrays = arrays._replace(adapters=np.concatenate([adapter_slots(step, bucket) for step in work]))
        if self._image_pool is not None and bucket.tiles:
            for pixels, grids, places in self._image_pool.missing(work):
                self._everywhere("image", pixels, grids, places)
            index = [state_index(step, bucket, self._image_pool.images) for step in work]
            arrays = arrays._replace(images=np.concatenate(index))
        if self.images is not None and self.images.patches is not None:
            parts = zip(work, np.split(arrays.positions, len(work)), strict=True)
            arrays = arrays._replace(rotary=np.concatenate([rotary_positions(step, bucket, at) for step, at in parts]))
        self._everywhere("step", bucket, arrays, None if self.heads is None else self.heads.inputs(work, bucket))
        return Dispatched(bucket, np.concatenate([chosen_slots(step, bucket) for step in work]))

    def drop_cache(self) -> None:
        """Release the memory of the cache, also that of the heads; the next use creates an empty one."""
        for programs in (self, *([] if self.heads is None else [self.heads])):
            vars(programs).pop("cache", None)

    def choose(self, step: Dispatched, chooser: Chooser, inputs: Any) -> Any:
        """Dispatch the choice of the tokens that follow the last step -> output of the chooser, arrays on the device.

        inputs: the chooser's arrays, `bucket.choices` of each replica, concatenated.
        """
        return self._everywhere("choose", step.bucket, self.choosers.index(chooser), inputs, step.slots)

    def score(self, step: Dispatched, scorer: StateScorer, targets: np.ndarray) -> Any:
        """Score the prompts' tokens of the last step. targets: int32 [replicas * chunk], as in `StateScorer`."""
        return self._everywhere("score", step.bucket, scorer, targets)

    def write_adapter(self, slot: int, values: Mapping[str, np.ndarray]) -> None:
        """Replace the adapter in a slot for the following steps. values: arrays of a slot by path."""
        self._everywhere("write_adapter", slot, values)

    def _everywhere(self, name: str, *arguments: object) -> Any:
        """Run an operation on the devices of all processes -> its result."""
        with self.announced(name, arguments):
            return self.operate(name, *arguments)

    def operate(self, name: str, *arguments: Any) -> Any:
        """Run this process's part of an operation. All processes run the same ones in the same order, with equal
        arguments: arrays on the host. Results are replicated, so that each process can read them."""
        match name, arguments:
            case "step", (bucket, arrays, after):
                self._output, self.cache = self._step(bucket)(self.weights, self.cache, self.latest, arrays)
                self._inputs = arrays._replace(adapters=None, images=None), after
            case "copy", (sources, targets):
                self.cache = self._state_copier()(self.cache, sources, targets)
            case "choose", (bucket, number, inputs, slots):
                choose, out = self._choice(bucket, self.choosers[number]), self._output
                chosen, self.latest = choose(out.logits, out.tokens, inputs, self.latest, slots)
                if self.heads is not None:
                    (arrays, after), draft = self._inputs, self._drafts(self.heads, bucket)
                    of_step = out.states, arrays, chosen.token, after
                    self.following, self.heads.cache = draft(self.weights, self.heads.cache, *of_step)
                return chosen
            case "score", (bucket, scorer, targets):
                return self._scores(bucket, scorer)(self.weights, self._output.prompts, targets)
            case "encode", (texts,):
                self.cache = self._encoder(texts.tokens.shape[1])(self.weights, self.cache, texts)
            case "image", (pixels, grids, places) if self.images is not None:
                self.cache = self._image_reader(self.images)(self.weights, self.cache, pixels, grids, places)
            case "compile", (number,):
                self._needed()[number][1]()
            case "allocate", ():
                jax.block_until_ready((self.cache, self.latest, {} if self.heads is None else self.heads.cache))
            case "write_adapter", (slot, values):
                old = {path: self.weights[path] for path in values}
                self.weights |= self._adapter_writer()(old, values, np.int32(slot))
            case _:
                raise ValueError(f"{name} is no operation")

    def _state_copier(self) -> jax.stages.Compiled:
        """The program that copies states of rows: (cache, int32 [replicas * 2] slots, and those to write) -> cache."""
        layout = self.loaded.layout
        axes = {leaf.name: leaf.axes for leaf in self.leaves if leaf.per == "row" and leaf.name != IMAGES}

        def copy(cache: Cache, sources: Array, targets: Array) -> Cache:
            states = {name: cache[name] for name in axes}
            return {**cache, **copied_states(layout, states, axes, sources, targets)}

        def lower() -> jax.stages.Lowered:
            slots, shardings = self.loaded.like(COPIES), {n: x.sharding for n, x in self.cache_like.items()}
            jitted = jax.jit(copy, donate_argnums=0, out_shardings=shardings)
            return jitted.lower(self.cache_like, slots, slots)

        return self._compiled("copies", lower)

    def _adapter_writer(self) -> jax.stages.Compiled:
        """The program that writes a slot: (arrays of all slots, those of an adapter, int32 slot) -> arrays."""
        if self.loaded.adapters is None:
            raise ValueError("the model has no slots for adapters")
        declared, rank = specs(self.loaded.model, Adapter), self.loaded.adapters.rank
        axis_of = {path: spec.axes.index("rank") for path, spec in declared.items()}

        def written(leaf: Array | tuple, values: Array, first: Array, axis: int) -> Array | tuple:
            if isinstance(leaf, tuple):  # As `layers_apart` has them.
                return tuple(written(row, values[number], first, axis - 1) for number, row in enumerate(leaf))
            return jax.lax.dynamic_update_slice_in_dim(leaf, values, first, axis)

        def write(leaves: Mapping[str, Any], values: Params, slot: Array) -> Mapping[str, Any]:
            return {path: written(leaf, values[path], slot * rank, axis_of[path]) for path, leaf in leaves.items()}

        def lower() -> jax.stages.Lowered:
            likes, of_one = {path: self.loaded.weights[path] for path in declared}, {}
            for path, like in likes.items():
                shape = (len(like), *like[0].shape) if isinstance(like, tuple) else like.shape
                shape, axes = list(shape), self.loaded.layout.plan.axes_in_step(declared[path].axes)
                shape[axis_of[path]], dtype = rank, jax.tree.leaves(like)[0].dtype
                of_one[path] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.loaded.sharding(*axes))
            shardings = jax.tree.map(lambda like: like.sharding, likes)
            jitted = jax.jit(write, donate_argnums=0, out_shardings=shardings)
            return jitted.lower(likes, of_one, jax.ShapeDtypeStruct((), jnp.int32))

        return self._compiled("adapters", lower)

    def encode_texts(self, rows: abc.Sequence[Sequence | None]) -> None:
        """Run the encoder on the texts of rows, one of each replica, and write its output into their slots."""
        self._everywhere("encode", texts_of(rows, self.text_lengths))

    def _encoder(self, length: int) -> jax.stages.Compiled:
        """The encoder program of a text length."""
        loaded, rows = self.loaded, self.replicas

        def encode(weights: Params, cache: Cache, texts: Texts) -> Cache:
            step_rows = StepRows(
                groups=((1, length),),
                kernel=self.kernel,
                slots=jnp.zeros(rows, jnp.int32),
                tables=(jnp.zeros((rows, 1), jnp.int32),),
                counts=(texts.counts,),
                states=(texts.states,),
                layer=jnp.int32(0),
                loop=loaded.loop,
            )
            ctx = Context(jnp.zeros((rows, 1), jnp.int32), jnp.zeros(1, jnp.int32), rows=step_rows)
            model = loaded.bound(weights)
            return {**cache, **model.remember(texts.tokens, of_layers(cache), ctx)}

        def lower() -> jax.stages.Lowered:
            texts = Texts(loaded.like(1, length), loaded.like(1), loaded.like(1))
            return jax.jit(encode, donate_argnums=1).lower(loaded.weights, self.cache_like, texts)

        return self._compiled(length, lower)

    def _image_reader(self, images: ImageInput) -> jax.stages.Compiled:
        """The program of images: (weights, cache, pixels, grids, places) -> cache; see `ImagePool.missing`."""
        loaded = self.loaded

        def read(weights: Params, cache: Cache, pixels: Array, grids: Array, places: Array) -> Cache:
            return written(loaded.layout, cache, loaded.bound(weights).image_states(pixels, grids), places)

        def lower() -> jax.stages.Lowered:
            pixels, grids = loaded.like(1, *images.shape(), dtype=jnp.uint8), loaded.like(1, 2)
            jitted = jax.jit(read, donate_argnums=1)
            return jitted.lower(loaded.weights, self.cache_like, pixels, grids, loaded.like(1))

        return self._compiled(IMAGES, lower)

    def like(self, bucket: Bucket) -> StepArrays:
        """Shapes and shardings of the arrays of a step."""
        loaded, images, tokens = self.loaded, self.images, bucket.tokens
        return like_arrays(loaded, bucket, self.width)._replace(
            adapters=None if loaded.adapters is None else loaded.like(tokens),
            images=loaded.like(tokens) if images is not None and bucket.tiles else None,
            rotary=loaded.like(tokens, 1, 3) if images is not None and images.patches is not None else None,
        )
