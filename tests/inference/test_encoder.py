"""Embeddings of an encoder: the states of the trainer's forward, over batches of texts of several lengths."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import loaded
from test_embeddings import embedding
from test_engine import Client, idle, serve
from test_programs import VOCABULARY

from megajax.config.errors import UserError
from megajax.inference.assembly import encoder_engine
from megajax.inference.config import InferenceConfig
from megajax.inference.encoder import EncoderDevice, EncoderPrograms
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Refused
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import bind
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.tokenizers.config import ByteTokenizerConfig

LENGTH = 150
MODEL = BertConfig(
    hidden=32,
    vocabulary_size=VOCABULARY,
    sequence_length=LENGTH,
    stack=StackConfig(
        pattern=(
            BlockConfig(
                mixer=AttentionConfig(heads=4, causal=False, bias=True, kernel="reference"),
                mlp=DenseMLPConfig(ffn=48, bias=True),
                norm=LayerNormConfig(),
            ),
        ),
        repeats=2,
    ),
    embedding_norm=LayerNormConfig(),
    init_std=0.3,
)


def states_of(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    """Of the trainer's whole model, the states before its heads, [prompts, LENGTH, D]."""
    rows, segments = np.zeros((2, len(prompts), LENGTH), np.int32)
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
def test_embeddings_are_the_states_of_the_trainer(sizes: dict[str, int]) -> None:
    whole, draw = loaded(MODEL, sizes), np.random.default_rng(3)
    encoder = loaded(MODEL.text_encoder(), sizes)
    assert encoder.weights.keys() == {
        path for path in whole.weights if not path.startswith(("masked", "pooler", "order"))
    }
    same = {path: whole.weights[path] for path in encoder.weights}
    device = EncoderDevice(EncoderPrograms(replace(encoder, weights=same), rows=4, length=LENGTH), VOCABULARY)
    engine = Engine(device)
    prompts = [draw.integers(0, VOCABULARY - 6, count).tolist() for count in (1, 7, 64, 65, 128, 129, 150, 3, 3, 90)]
    clients = [(embedding(prompt, pooling), pooling) for pooling in ("first", "last", "mean") for prompt in prompts]
    for client, _ in clients:
        engine.submit(client.request)
    serve(engine)
    states = states_of(whole, prompts).astype(np.float64)
    for place, (client, pooling) in enumerate(clients):
        of_prompt = states[place % len(prompts), : len(prompts[place % len(prompts)])]
        vector = {"first": of_prompt[0], "last": of_prompt[-1], "mean": of_prompt.mean(0)}[pooling]
        assert (client.answer.finish, client.answer.tokens) == ("length", ())
        np.testing.assert_allclose(client.answer.embedding, vector / np.linalg.norm(vector), atol=1e-5)
    assert engine.statistics().steps_total <= len(clients) // 4 + 1
    idle(engine)


def test_an_encoder_gives_no_text() -> None:
    encoder = loaded(MODEL.text_encoder(), {})
    device = EncoderDevice(EncoderPrograms(encoder, rows=2, length=LENGTH), VOCABULARY)
    assert len(list(device.programs.compile())) == device.programs.count == 1 * 3
    with pytest.raises(Refused, match="no text") as refused:
        Engine(device).check(Client([1, 2]).request)
    assert refused.value.field == "pooling"
    for setting in ("adapters", "speculate"):
        with pytest.raises(UserError, match=f"inference.{setting}=2: BertEncoderConfig gives embeddings"):
            config = InferenceConfig(**{setting: 2})
            encoder_engine(encoder, config, ByteTokenizerConfig().build(), length=LENGTH, queue=1)
    with pytest.raises(Refused, match="may have 150"):
        Engine(device).check(embedding([1] * (LENGTH + 1), "mean").request)
