"""A model as the device of an engine: steps of the scheduler in, sampled tokens out; and its weights, which may be
replaced, moved to the memory of the host, or dropped."""

from collections import abc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.inference.loaded_model import StepWeightMaker, demand_alike
from megajax.inference.model_step import STATES
from megajax.inference.programs import Dispatched, Programs
from megajax.inference.request import Pooled, Sampled, Sequence, Step, TokenScore
from megajax.inference.sampling.choose import Chosen
from megajax.inference.sampling.chooser import TOP, PromptScorer, PromptScores, RowChooser, place, program_of
from megajax.inference.step_arrays import Bucket, first_tokens
from megajax.layers.decoding import Cache
from megajax.layers.param import Adapter, specs
from megajax.mesh.layout import Layout
from megajax.mesh.named_shardings import replicated
from megajax.models.answers.config import EXPERTS
from megajax.models.protocol import GeneratingModel


class ModelDevice:
    """A `megajax.inference.request.EngineDevice` that runs a model's compiled steps."""

    generates = True
    top = TOP
    """Maximum of `Sequence.top`."""

    def __init__(self, programs: Programs, vocabulary: int):
        """programs: with `chooser.choosers(vocabulary)`; vocabulary: ids in use."""
        self.programs, self.vocabulary = programs, vocabulary
        self.choosers: abc.Sequence[RowChooser] = [
            chooser for chooser in programs.choosers if isinstance(chooser, RowChooser)
        ]
        self.scorer, self.embedder = PromptScorer(vocabulary), Embedder(programs.tile)
        self.rows, self.chunk, self.tile, self.length = programs.rows, programs.chunk, programs.tile, programs.length
        self.block, self.blocks, self.replicas = programs.size.block, programs.size.blocks, programs.replicas
        self.drafts, self.prefix_sharing, self.window = programs.drafts, programs.prefix_sharing, programs.window
        self.snapshots = programs.size.snapshots
        self.memory, self.images = max(programs.text_lengths, default=0), programs.images
        reader = ExpertReader(programs)
        self.experts: Callable[[int, Sequence], Any] | None = reader if reader.names else None

    def start(self, work: abc.Sequence[Step | None]) -> "ModelStep":
        """Dispatch a step of each replica."""
        return ModelStep(self, work, self.programs.start(work))


class ExpertReader:
    """Reads the experts of a sequence's tokens from the cache, by one program; see `Device.experts`.

    Attributes:
        names: of the leaves of the cache with experts; empty if there are none.
    """

    def __init__(self, programs: Programs):
        stack, loaded = programs.loaded.cfg.stack, programs.loaded
        numbers = {EXPERTS.format(number): np.array(layers) for number, (_, layers) in enumerate(stack.stored())}
        sizes = {leaf.name: leaf.shape[0] for leaf in programs.leaves if leaf.name in numbers}
        shape = (programs.width * programs.size.block, stack.layers(), max(sizes.values(), default=0))
        self._programs, self.names, layout = programs, tuple(sizes), loaded.layout

        def local(leaves: Cache, replica: Array, blocks: Array) -> Array:
            experts, axes = jnp.zeros(shape, jnp.int16), layout.sharded_axes("batch")
            for name, leaf in leaves.items():
                of_tokens = leaf[:, blocks].reshape(leaf.shape[0], shape[0], -1).swapaxes(0, 1)
                experts = experts.at[:, numbers[name], : sizes[name]].set(of_tokens)
            if not axes:
                return experts
            return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == replica, experts, 0), axes)

        def read(leaves: Cache, replica: Array, blocks: Array) -> Array:
            pools = dict.fromkeys(leaves, (None, "batch", None, None))
            return layout.island(local, (pools, (), (None,)), (None,) * 3)(leaves, replica, blocks)

        self._read = jax.jit(read, out_shardings=replicated(loaded.mesh), compiler_options=dict(loaded.options))

    def __call__(self, replica: int, row: Sequence) -> Array:
        programs, blocks = self._programs, np.zeros(self._programs.width, np.int32)
        blocks[: len(row.blocks)] = row.blocks
        with jax.set_mesh(programs.loaded.mesh):
            experts = self._read({name: programs.cache[name] for name in self.names}, np.int32(replica), blocks)
        experts.copy_to_host_async()
        return experts


class Embedder(NamedTuple):
    """Adds up the states of the prompts of a step, in a compiled program; a `model_step.Scorer`."""

    tile: int
    """Tokens of a tile; a step has at most one prompt for each tile."""

    def __call__(self, layout: Layout, model: GeneratingModel, states: Array, targets: Array) -> Array:
        """float32 [replicas * tiles, D]: for each prompt, the sum of the final norm's output over the tokens whose
        target it is."""

        def sums(states: Array, targets: Array) -> Array:
            zeros = jnp.zeros((targets.shape[0] // self.tile, states.shape[-1]), jnp.float32)
            return zeros.at[targets].add(states[:, 0].astype(jnp.float32), mode="drop")

        return layout.island(sums, (STATES, ("batch",)), ("batch", None))(model.final_norm(states), targets)

    def targets(self, work: abc.Sequence[Step | None], bucket: Bucket) -> np.ndarray:
        """int32 [replicas * chunk]: for each token, the prompt of its replica to which it is added; the number of tiles
        for none."""
        targets = np.full((len(work), bucket.chunk), bucket.tiles, np.int32)
        for replica, step in enumerate(work):
            firsts = first_tokens(step, bucket.tile) if step else []
            for number, first in enumerate(firsts):
                positions = pooled_positions(step, number) if step else range(0)
                start = first - step.prompts[number][1] if step else 0
                targets[replica, [start + at for at in positions]] = number
        return targets.reshape(-1)

    def add_to(self, samples: list[Sampled], step: Step, sums: np.ndarray) -> None:
        """Add the sums [tiles, D] of a replica to its results, which are in the order of `Step.parts`."""
        for number in range(len(step.prompts)):
            if positions := pooled_positions(step, number):
                place = len(step.decode) + number
                samples[place] = samples[place]._replace(pooled=Pooled(positions[0], sums[number]))


def pooled_positions(step: Step, number: int) -> range:
    """The positions of a prompt's tokens in a step whose states are added up for its embedding."""
    row, start, count = step.prompts[number]
    if row.pooling is None:
        return range(0)
    if row.pooling == "first":
        return range(start, 1)
    return range(start if row.pooling == "mean" else max(start, row.prompt - 1), start + count)


class HostArray(NamedTuple):
    """An array in host memory: the parts of this process's devices."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: Mapping[Any, np.ndarray]
    """By the place of the part in the array; parts that several devices have are kept once."""
    places: tuple[tuple[jax.Device, Any], ...]
    """Each device with the place of its part."""

    @classmethod
    def of(cls, array: Array) -> "HostArray":
        """A copy of an array; on CPUs the array's own memory."""
        parts, places = {}, []
        for shard in array.addressable_shards:
            place = str(shard.index)
            parts.setdefault(place, np.asarray(shard.data))
            places.append((shard.device, place))
        return cls(array.shape, array.sharding, parts, tuple(places))

    def on_devices(self) -> Array:
        """The array on the devices."""
        parts = [jax.device_put(self.parts[place], device) for device, place in self.places]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


class ModelWeights:
    """A `megajax.inference.request.MovableWeights`: those of the compiled steps of a model."""

    def __init__(self, programs: Programs):
        self._programs, self._at_rest = programs, dict[str, Any]()
        self._slots = frozenset(specs(programs.loaded.model, Adapter))
        self._makes = StepWeightMaker(programs.loaded)

    def prepare(self, weights: Params | Callable[[], Params], *, shared: bool = False) -> Callable[[], Params]:
        """weights: the arrays of a training state by path; or a function that returns weights as steps read them.
        shared: see `Engine.refit`."""
        if not isinstance(weights, Mapping):
            return weights
        self._makes.check(weights)
        return partial(self._makes, weights, shared=shared)

    def replace(self, make: Callable[[], Params]) -> None:
        programs, likes = self._programs, self._programs.loaded.weights
        # Adapters stay.
        for weights in (self._at_rest, programs.weights):
            for path in weights.keys() - self._slots:
                del weights[path]
        new = make()
        demand_alike(new, {path: like for path, like in likes.items() if path not in self._slots})
        programs.weights |= new

    def sleep(self, *, keep: bool) -> None:
        programs = self._programs
        for path in [*programs.weights] if keep else self._slots & programs.weights.keys():
            self._at_rest[path] = jax.tree.map(HostArray.of, programs.weights[path])
        programs.weights.clear()
        programs.drop_cache()

    def wake(self) -> None:
        programs = self._programs
        if programs.loaded.weights.keys() - programs.weights.keys() - self._at_rest.keys():
            raise UserError("the engine has no weights: call refit before it wakes up")
        for path in [*self._at_rest]:
            stored, is_stored = self._at_rest.pop(path), lambda leaf: isinstance(leaf, HostArray)
            programs.weights[path] = jax.tree.map(HostArray.on_devices, stored, is_leaf=is_stored)
        programs.operate("allocate")


class ModelStep:
    """A `megajax.inference.request.StartedStep` of a model."""

    def __init__(self, device: ModelDevice, work: abc.Sequence[Step | None], step: Dispatched):
        self._device, self._work, self._step = device, work, step
        self._chosen: tuple[Chosen, PromptScores | None, Any]
        self._drafts: Any

    def choose(self) -> None:
        device, work, step = self._device, self._work, self._step
        programs, scorer, embedder = device.programs, device.scorer, device.embedder
        needed = max(program_of(row) for step in work if step is not None for row, _ in step.parts())
        chooser = next(chooser for chooser in device.choosers if chooser.program >= needed)
        chosen = programs.choose(step, chooser, chooser.inputs(work, step.bucket))
        self._drafts = programs.following
        prompts = [row for step in work if step is not None for row, _, _ in step.prompts]
        scores: PromptScores | None = None
        if any(row.unscored for row in prompts):
            scores = programs.score(step, scorer, scorer.targets(work, step.bucket))
        sums: Array | None = None
        if any(row.pooling for row in prompts):
            sums = programs.score(step, embedder, embedder.targets(work, step.bucket))
        self._chosen = chosen, scores, sums

    def results(self) -> list[list[Sampled]]:
        step, embedder, heads = self._step, self._device.embedder, self._device.programs.heads
        (chosen, scores, sums), drafts = jax.device_get((self._chosen, self._drafts))
        results = list[list[Sampled]]()
        if heads is not None:
            heads.receive(self._work, step.bucket, drafts)
        for replica, part in enumerate(self._work):
            rows = [] if part is None else [row for row, _ in part.parts()]
            results.append([_row(row, chosen, step.row(replica, number)) for number, row in enumerate(rows)])
            if part is not None and scores is not None:
                _add_prompt_scores(results[replica], part, replica, step.bucket, scores)
            if part is not None and sums is not None:
                embedder.add_to(results[replica], part, sums[replica * step.bucket.tiles :])
        return results


def _add_prompt_scores(samples: list[Sampled], step: Step, replica: int, bucket: Bucket, scores: PromptScores) -> None:
    for number, ((row, start, count), first) in enumerate(
        zip(step.prompts, first_tokens(step, bucket.tile), strict=True), len(step.decode)
    ):
        if row.unscored:
            following, top = row.tokens[start + 1 : min(start + count + 1, row.prompt)], row.sampling.prompt_logprobs
            places = [place(first + after, replica, bucket.chunk) for after in range(len(following))]
            token_scores = (_score(token, at, top or 0, scores) for token, at in zip(following, places, strict=True))
            samples[number] = samples[number]._replace(prompt=tuple(token_scores))


def _row(row: Sequence, rows: Chosen, place: int) -> Sampled:
    result, *following = (_sample(row, rows, place + ahead) for ahead in range(1 + len(row.draft)))
    return result._replace(following=tuple(following)) if following else result


def _sample(row: Sequence, rows: Chosen, place: int) -> Sampled:
    sample = Sampled(
        int(rows.token[place]),
        float(rows.logprob[place]),
        finite=bool(rows.finite[place]),
        drawn=float(rows.drawn[place]),
    )
    if not row.top or rows.scores is None:
        return sample
    top = _pairs(rows.scores.top[place], rows.scores.logprobs[place], row.top)
    if row.sampling.logprob_tokens and rows.listed is not None:
        top = tuple(zip(row.sampling.logprob_tokens, rows.listed[place].tolist(), strict=False))
    return sample._replace(rank=int(rows.scores.rank[place]), top=top)


def _score(token: int, at: tuple[int, int], count: int, scores: PromptScores) -> TokenScore:
    top = _pairs(scores.scores.top[at], scores.scores.logprobs[at], count)
    return TokenScore(token, float(scores.logprob[at]), int(scores.scores.rank[at]), top)


def _pairs(tokens: Array, logprobs: Array, count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True))
