"""Embeddings of prompts: the states of the trainer's forward, beside other requests, over chunks and preemptions."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of
from stand_in import StandIn
from test_engine import Client, idle, serve
from test_programs import HEADS, LENGTH, MODELS, ROPE, VOCABULARY, decoder

from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Pooling, Refused
from megajax.inference.sampling.chooser import choosers
from megajax.layers.context import Context
from megajax.layers.param import bind


def embedding(prompt: list[int], pooling: Pooling) -> Client:
    """A request for an embedding."""
    client = Client(prompt, max_tokens=0)
    client.request.pooling = pooling
    return client


def states_of(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    """Output of the trainer's final norm, float32 [prompts, LENGTH, D]."""
    rows = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    index = jnp.arange(LENGTH)

    def run(weights: Any, tokens: jax.Array) -> jax.Array:
        return bind(model.model, weights).hidden_states(tokens, Context(jnp.tile(index, (len(prompts), 1)), index))

    with jax.set_mesh(model.mesh):
        return np.asarray(jax.jit(run)(model.weights, rows))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama", {"tensor": 2}, id="tensor"),
        pytest.param("llama", {"data": 2, "tensor": 2}, id="replicas", marks=pytest.mark.slow),
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
    states = states_of(model, prompts).astype(np.float64)
    for place, (client, pooling) in enumerate(clients):
        prompt = prompts[place % len(prompts)]
        of_prompt = states[place % len(prompts), : len(prompt)]
        vector = {"first": of_prompt[0], "last": of_prompt[-1], "mean": of_prompt.mean(0)}[pooling]
        assert (client.answer.finish, client.answer.tokens) == ("length", ())
        np.testing.assert_allclose(client.answer.embedding, vector / np.linalg.norm(vector), atol=1e-5)


def test_an_embedding_has_no_answer() -> None:
    engine = Engine(StandIn())
    for settings in ({"max_tokens": 1}, {"max_tokens": 0, "n": 2}):
        client = Client([1, 2], **settings)
        client.request.pooling = "last"
        with pytest.raises(Refused, match="max_tokens=0") as refused:
            engine.submit(client.request)
        assert refused.value.field == "pooling"
    idle(engine)
