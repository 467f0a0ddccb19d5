"""Drafts by heads of multi-token prediction: the answers of steps without drafts, in fewer steps."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import loaded, programs_of
from test_engine import Client, demand_equal, serve
from test_programs import HEADS, MAMBA, ROPE, VOCABULARY, decoder
from test_speculation import SETTINGS, TEXT
from user_errors import user_error

from megajax.inference.admission import AnswerRules
from megajax.inference.assembly import FreeMemory, cache_size, make_engine
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice, ModelWeights
from megajax.inference.engine import Engine, Statistics
from megajax.inference.loaded_model import CacheSize, LoadedModel, layers_apart
from megajax.inference.sampling.chooser import choosers
from megajax.inference.speculation.prediction_heads import FromStep, PredictionHeads
from megajax.layers.context import Context
from megajax.layers.param import bind
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.server.server import _drafts

DRAFTS, LENGTH = 4, 64
PREDICTING = replace(decoder(replace(HEADS, rope=ROPE)), sequence_length=LENGTH, prediction=PredictionConfig())


def device_of(
    model: LoadedModel, *, drafts: int = DRAFTS, blocks: int = 24, tile: int = 4, **sizes: Any
) -> ModelDevice:
    """A device with steps of 3 rows and blocks of 4 tokens, for which the heads draft if there are any."""

    def heads(size: CacheSize, **settings: Any) -> PredictionHeads | None:
        return PredictionHeads(model, size, vocabulary=VOCABULARY, **settings) if drafts else None

    shapes: Any = {"chunks": (0, 8), "tile": tile, "blocks": blocks, "length": LENGTH, "rows": 3, **sizes}
    programs = programs_of(model, choosers(VOCABULARY), drafts=drafts, heads=heads, **shapes)
    return ModelDevice(programs, VOCABULARY)


def answers(device: ModelDevice, kinds: Any = SETTINGS * 2, *, tokens: int = 40) -> tuple[list[Client], Statistics]:
    """The answers to prompts with shared prefixes, all at the same time."""
    draw = random.Random(4)
    heads = [[draw.randrange(VOCABULARY) for _ in range(15)] for _ in range(2)]
    clients = [Client([*heads[number % 2], number], max_tokens=tokens, **kind) for number, kind in enumerate(kinds)]
    engine = Engine(device, AnswerRules(drafter=FromStep))
    serve(engine, *clients)
    return clients, engine.statistics()


PLAIN = ({}, {"temperature": 1, "seed": 1, "n": 2}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}, {"logprobs": 2})


@pytest.fixture(scope="module")
def predicting() -> LoadedModel:
    """A model whose heads are as wrong as random weights are."""
    return loaded(PREDICTING, {})


@pytest.fixture(scope="module")
def device(predicting: LoadedModel) -> ModelDevice:
    return device_of(predicting, blocks=16)


@pytest.mark.slow
def test_drafts_are_those_of_the_trainers_head(predicting: LoadedModel, device: ModelDevice) -> None:
    """The drafts are computed from the whole text: by the head over all tokens, and then over its own states.

    Prompts in chunks beside decoding rows, with rows that are preempted; without blocks of others, whose last keys
    would be of another token.
    """

    def whole(weights: Any, tokens: jax.Array) -> jax.Array:
        return bind(predicting.model, weights).hidden_states(tokens, context)

    def head(weights: Any, x: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = bind(predicting.model, weights)
        x = model.predictions[0](x, model.embed_tokens(following), context)
        return x, jnp.argmax(model.logits(x), axis=-1)

    positions = jnp.arange(LENGTH)
    context = Context(positions[None], positions)
    with jax.set_mesh(predicting.mesh):
        whole, head = jax.jit(whole), jax.jit(head)

    def expected(tokens: list[int], count: int) -> list[int]:
        padded, found = jnp.zeros((1, LENGTH), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens)), list[int]()
        with jax.set_mesh(predicting.mesh):
            x, following, last = whole(predicting.weights, padded), jnp.roll(padded, -1, axis=1), len(tokens) - 2
            for place in range(last, last + count):
                out, token = head(predicting.weights, x, following)
                found.append(int(token[0, place]))
                x, following = x.at[0, place + 1].set(out[0, place]), following.at[0, place + 1].set(found[-1])
        return found

    given: list[tuple[list[int], list[int]]] = []

    class Recorded(FromStep):
        def draft(self, tokens: list[int]) -> list[int]:
            given.append((list(tokens), super().draft(tokens)))
            return given[-1][1]

    draw = np.random.default_rng(3)
    clients = [Client(draw.integers(0, VOCABULARY, count).tolist(), max_tokens=14) for count in (19, 9, 3, 14, 2, 1)]
    engine = Engine(device, AnswerRules(drafter=Recorded))
    serve(engine, *clients)
    assert engine.statistics().preemptions_total > 0
    full = [(tokens, draft) for tokens, draft in given if draft]
    assert sum(len(draft) == DRAFTS for _, draft in full) > 20
    for tokens, draft in full:
        assert draft == expected(tokens, len(draft)), tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "layout", "kinds", "sizes"),
    [
        pytest.param(PREDICTING, {}, SETTINGS, {}, id="one"),
        pytest.param(PREDICTING, {"data": 2, "tensor": 2}, SETTINGS, {"blocks": 16}, id="several"),
        pytest.param(decoder(MAMBA, replace(HEADS, rope=ROPE)), {}, PLAIN, {"tile": 8, "snapshots": 2}, id="states"),
    ],
)
def test_answers_are_those_without_drafts(
    stack: DecoderConfig, layout: dict[str, int], kinds: Any, sizes: dict[str, int]
) -> None:
    """Requests have all settings, few blocks and shared prefixes."""
    cfg = replace(stack, sequence_length=LENGTH, prediction=PredictionConfig())
    before, _ = answers(device_of(loaded(cfg, {}), drafts=0, **sizes), kinds * 2)
    clients, counts = answers(device_of(loaded(cfg, layout), **sizes), kinds * 2)
    demand_equal(before, clients, atol=1e-4)
    assert counts.preemptions_total > 0 and counts.shared_tokens_total > 0
    assert counts.drafted_tokens_total > counts.accepted_tokens_total


@pytest.mark.slow
def test_heads_sleep_with_their_model(device: ModelDevice) -> None:
    """Drafts for a request that began before are as good as those for a later one."""
    engine = Engine(device, AnswerRules(drafter=FromStep), weights=ModelWeights(device.programs))
    client, later = Client(range(9), max_tokens=30), Client(range(9), max_tokens=30)
    engine.submit(client.request)
    for _ in range(3):
        engine.step()
    engine.sleep()
    assert device.programs.heads is not None and "cache" not in vars(device.programs.heads)
    engine.wake()
    serve(engine, later)
    assert client.answer.tokens == later.answer.tokens


def test_blocks_behind_the_windows_of_the_model_and_its_heads_are_freed() -> None:
    """The wider window counts; without one in the heads, none is freed."""
    blocks = [decoder(replace(HEADS, rope=ROPE, window=window)).stack.pattern[0] for window in (5, 9, None)]
    narrow = replace(PREDICTING, stack=replace(PREDICTING.stack, pattern=(blocks[0],)))
    models = [loaded(replace(narrow, prediction=PredictionConfig(block=block)), {}) for block in blocks]
    assert [device_of(model).window for model in models] == [5, 9, None]
    assert device_of(models[1], drafts=0).window == 5


def test_both_caches_share_the_memory(predicting: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig(speculate=2, drafts="mtp", compute="float32")
    leaves = predicting.cfg.cache_leaves(1)
    of_block = 4 * config.block * sum(leaf.size for leaf in leaves)
    monkeypatch.setattr("megajax.inference.assembly.free_memory", lambda devices: FreeMemory(of_block * 100, True))
    sizes = [cache_size(config, LENGTH, predicting, "float32", of_heads).blocks for of_heads in ((), leaves)]
    assert sizes == [90, 45]


def test_an_engine_whose_heads_draft() -> None:
    config = InferenceConfig(speculate=2, drafts="mtp", compute="float32", rows=2)
    settings: Any = {"end_tokens": (), "length": LENGTH, "queue": 1}
    engine = make_engine(loaded(PREDICTING, {}), config, TEXT, **settings)
    assert isinstance(engine.device, ModelDevice) and engine.device.drafts == 2
    assert _drafts(engine.device.programs) == "2 tokens in a step, by 1 of the model's heads of multi-token prediction"
    with user_error("inference.drafts"):
        make_engine(loaded(replace(PREDICTING, prediction=None), {}), config, TEXT, **settings)
    state = PredictionConfig(block=decoder(MAMBA).stack.pattern[0])
    with user_error("inference.drafts"):
        make_engine(loaded(replace(PREDICTING, prediction=state), {}), config, TEXT, **settings)
    assert [problem.setting for problem in InferenceConfig(drafts="mtp").problems()] == ["drafts"]


def right(cfg: DecoderConfig) -> LoadedModel:
    """A model whose next token depends on the last one alone, and whose heads know that: blocks add nothing, and a head
    passes the embedding of its token on."""
    model = loaded(cfg, {})
    weights = dict(model.weights)
    for path, w in weights.items():
        if path.endswith(("mixer.output", "mlp.down")):
            weights[path] = jnp.zeros_like(w)
        if path.startswith("predictions"):
            name = path.split(".", 2)[2]
            fixed = {"from_embedding": jnp.eye(cfg.hidden), "embedding_norm.gain": jnp.ones(cfg.hidden)}
            fixed |= {"from_state": jnp.zeros_like(w), "norm.gain": weights["norm.gain"]}
            weights[path] = jax.device_put(fixed.get(name, weights[path]), w.sharding)
    return replace(model, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_all_drafts_of_heads_that_are_right_are_accepted(depth: int) -> None:
    """Greedy and sampled, preempted, and with shared blocks; also by the last head again, with its spare blocks."""
    cfg = replace(PREDICTING, prediction=PredictionConfig(depth=depth))
    model = right(cfg)
    before, plain = answers(device_of(model, drafts=0), PLAIN * 3)
    clients, counts = answers(device_of(layers_apart(model)), PLAIN * 3)
    demand_equal(before, clients, atol=1e-4)
    assert counts.preemptions_total > 0 and counts.shared_tokens_total > 0
    assert 0 < counts.accepted_tokens_total == counts.drafted_tokens_total
    assert counts.steps_total < 0.4 * plain.steps_total


def test_the_program_copies_neither_its_cache_nor_weights() -> None:
    """This holds in the loop over the tokens of a draft too."""
    device = device_of(layers_apart(loaded(replace(PREDICTING, hidden=512), {})), blocks=2000)
    heads: Any = device.programs.heads
    analysis: Any = heads.lowered(device.programs.buckets[0]).compile().memory_analysis()
    matrices = [w.nbytes for w in jax.tree.leaves(device.programs.weights)]
    assert analysis.temp_size_in_bytes < min(max(matrices), max(x.nbytes for x in heads.cache.values()))
