"""Embeddings of prompts: the states of the trainer's forward.

Of a decoder, beside other requests, over chunks and preemptions; and of an encoder, over batches of several lengths.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of
from stand_in import StandIn
from test_engine import Client, demand_refused, idle, serve
from test_programs import HEADS, LENGTH, MODELS, ROPE, VOCABULARY, decoder, padded
from user_errors import user_error

from megajax.inference.assembly import encoder_engine
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice
from megajax.inference.encoder import EncoderDevice, EncoderPrograms
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Pooling
from megajax.inference.sampling.chooser import choosers
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import bind
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.tokenizers.config import ByteTokenizerConfig


def embedding(prompt: list[int], pooling: Pooling) -> Client:
    """A request for an embedding."""
    client = Client(prompt, max_tokens=0)
    client.request.pooling = pooling
    return client


def states_of(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    """Output of the trainer's final norm, float32 [prompts, LENGTH, D]."""
    index = jnp.arange(LENGTH)

    def run(weights: Any, tokens: jax.Array) -> jax.Array:
        return bind(model.model, weights).hidden_states(tokens, Context(jnp.tile(index, (len(prompts), 1)), index))

    with jax.set_mesh(model.mesh):
        return np.asarray(jax.jit(run)(model.weights, padded(prompts)))


def demand_pooled(asked: list[tuple[Client, Pooling]], prompts: list[list[int]], states: np.ndarray) -> None:
    """Asserts embeddings of unit length from states [prompts, positions, D]; requests go through the prompts again and
    again."""
    for place, (client, pooling) in enumerate(asked):
        of_prompt = states[place % len(prompts), : len(prompts[place % len(prompts)])].astype(np.float64)
        vector = {"first": of_prompt[0], "last": of_prompt[-1], "mean": of_prompt.mean(0)}[pooling]
        assert (client.answer.finish, client.answer.tokens) == ("length", ())
        np.testing.assert_allclose(client.answer.embedding, vector / np.linalg.norm(vector), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama", {"tensor": 2}, id="tensor"),
        pytest.param("mamba 2", {}, id="mamba", marks=pytest.mark.slow),
    ],
)
def test_embeddings_are_the_states_of_the_trainer(name: str, sizes: dict[str, int]) -> None:
    """Longer than a chunk, several in a step, with a common prefix, while others are answered; and these get the
    tokens that they get alone."""
    cfg = decoder(replace(HEADS, rope=ROPE)) if name == "llama" else MODELS[name]
    model, draw = loaded(cfg, sizes), np.random.default_rng(3)
    tile = 2 if name == "llama" else CHUNK
    few = programs_of(model, choosers(VOCABULARY)[:1], chunks=(0, CHUNK), tile=tile, blocks=8)
    device = ModelDevice(few, VOCABULARY)
    head = draw.integers(0, VOCABULARY, 12).tolist()
    prompts = [head + draw.integers(0, VOCABULARY, count).tolist() for count in (0, 1, 5, 12)]
    # A chunk leaves a single token; the blocks of the first prompt leave one of the second.
    prompts += [head[:9], head[5:6], head[::-1], draw.integers(0, VOCABULARY, 17).tolist()]

    def answers() -> list[Client]:
        return [Client(prompt, max_tokens=12) for prompt in prompts[:2]]

    alone, beside = answers(), answers()
    for client in alone:
        serve(Engine(device), client)
    engine, poolings = Engine(device), ("mean", "last", "first", "last")
    clients = [(embedding(prompt, pooling), pooling) for pooling in poolings for prompt in prompts]
    for client in beside:
        engine.submit(client.request)
    for client, _ in clients:
        engine.submit(client.request)
    serve(engine)
    assert [client.answer.tokens for client in alone] == [client.answer.tokens for client in beside]
    assert engine.statistics().preemptions_total > 2 or sizes.get("data")
    demand_pooled(clients, prompts, states_of(model, prompts))


def test_an_embedding_has_no_answer() -> None:
    engine = Engine(StandIn())
    for settings in ({"max_tokens": 1}, {"max_tokens": 0, "n": 2}):
        client = Client([1, 2], **settings)
        client.request.pooling = "last"
        demand_refused(engine, client, "pooling", match="max_tokens=0")
    idle(engine)


LONGEST = 150
BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, causal=False, bias=True, kernel="reference"),
    mlp=DenseMLPConfig(ffn=48, bias=True),
    norm=LayerNormConfig(),
)
BERT = BertConfig(
    hidden=32,
    vocabulary_size=VOCABULARY,
    sequence_length=LONGEST,
    stack=StackConfig(pattern=(BLOCK,), repeats=2),
    embedding_norm=LayerNormConfig(),
    init_std=0.3,
)


def states_of_encoder(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    """The states before the heads of the trainer's whole model, [prompts, LONGEST, D]."""
    rows, segments = np.zeros((2, len(prompts), LONGEST), np.int32)
    for number, prompt in enumerate(prompts):
        rows[number, : len(prompt)], segments[number, : len(prompt)] = prompt, 1

    def run(weights: Any, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        bert = bind(model.model, weights)
        batch = {"tokens": tokens, "segment_ids": segment_ids, "token_types": tokens * 0}
        ctx = bert.context(batch)
        return bert.final_norm(bert.stack(bert.enter(bert.embed(batch), ctx), ctx))

    with jax.set_mesh(model.mesh):
        return np.asarray(jax.jit(run)(model.weights, rows, segments))


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="one"), pytest.param({"data": 2, "tensor": 2}, id="four", marks=pytest.mark.slow)]
)
def test_embeddings_of_an_encoder_are_the_states_of_the_trainer(sizes: dict[str, int]) -> None:
    whole, draw = loaded(BERT, sizes), np.random.default_rng(3)
    encoder = loaded(BERT.text_encoder(), sizes)
    assert encoder.weights.keys() == {
        path for path in whole.weights if not path.startswith(("masked", "pooler", "order"))
    }
    same = {path: whole.weights[path] for path in encoder.weights}
    device = EncoderDevice(EncoderPrograms(replace(encoder, weights=same), rows=4, length=LONGEST), VOCABULARY)
    engine = Engine(device)
    prompts = [draw.integers(0, VOCABULARY - 6, count).tolist() for count in (1, 7, 64, 65, 128, 129, 150, 3, 3, 90)]
    clients = [(embedding(prompt, pooling), pooling) for pooling in ("first", "last", "mean") for prompt in prompts]
    for client, _ in clients:
        engine.submit(client.request)
    serve(engine)
    demand_pooled(clients, prompts, states_of_encoder(whole, prompts))
    assert engine.statistics().steps_total <= len(clients) // 4 + 1
    idle(engine)


def test_an_encoder_gives_no_text() -> None:
    encoder = loaded(BERT.text_encoder(), {})
    device = EncoderDevice(EncoderPrograms(encoder, rows=2, length=LONGEST), VOCABULARY)
    assert len(list(device.programs.compile())) == device.programs.count == 1 * 3
    demand_refused(Engine(device), Client([1, 2]), "pooling", match="no text")
    for setting in ("adapters", "speculate"):
        with user_error():
            config = InferenceConfig(**{setting: 2})
            encoder_engine(encoder, config, ByteTokenizerConfig().build(), length=LONGEST, queue=1)
    demand_refused(Engine(device), embedding([1] * (LONGEST + 1), "mean"), "prompt", "too_long", "may have 150")
