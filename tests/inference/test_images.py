"""Images within prompts: the engine's tokens and log-probabilities are those of the trainer's forward."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of, whole_logits
from stand_in import StandIn
from test_engine import Client, demand_refused, idle, serve
from test_programs import HEADS, LENGTH, ROPE, VOCABULARY, decoder, padded

from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import ImageInput, PromptImage
from megajax.inference.sampling.chooser import choosers
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.llava.config import ProjectorConfig
from megajax.models.presets.vit import llava
from megajax.models.vision.config import VisionTowerConfig

TOKEN, SIZE, SLOTS = 249, 8, 2
BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, causal=False, bias=True, kernel="reference"), mlp=DenseMLPConfig(ffn=32, bias=True)
)
STACK = StackConfig(pattern=(BLOCK,), repeats=1)
TOWER = VisionTowerConfig(hidden=24, height=SIZE, width=SIZE, patch=4, stack=STACK, init_std=0.3)
MODEL = llava(
    decoder(replace(HEADS, rope=ROPE)), TOWER, image_token=TOKEN, slots=SLOTS, projector=ProjectorConfig(ffn=40)
)
COUNT = MODEL.image_positions()


def image(number: int, first: int) -> PromptImage:
    """A random picture at this place of a prompt."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
    return PromptImage(first, COUNT, pixels, bytes([number]) * 16)


def client(*parts: int | list[int], **settings: Any) -> Client:
    """A request whose prompt has text, and images by their numbers."""
    prompt, images = list[int](), list[PromptImage]()
    for part in parts:
        images += [image(part, len(prompt))] if isinstance(part, int) else []
        prompt += [TOKEN] * COUNT if isinstance(part, int) else part
    asking = Client(prompt, **settings)
    asking.request.images = tuple(images)
    return asking


def logits_of(model: LoadedModel, clients: list[Client]) -> np.ndarray:
    """The logits of the trainer's forward over prompts and answers, [rows, LENGTH, VOCABULARY]."""
    rows = padded([*asking.request.prompt, *asking.answer.tokens] for asking in clients)
    images = np.zeros((len(clients), SLOTS, SIZE, SIZE, 3), np.uint8)
    for number, asking in enumerate(clients):
        for slot, picture in enumerate(asking.request.images):
            images[number, slot] = picture.pixels
    return whole_logits(model, tokens=rows, images=images)[..., :VOCABULARY]


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="one"), pytest.param({"data": 2, "tensor": 2}, id="replicas", marks=pytest.mark.slow)]
)
def test_images_are_read_as_in_training(sizes: dict[str, int]) -> None:
    """Images are within and across chunks, alone and beside others, with shared prefixes and preemptions."""
    model = loaded(MODEL, sizes)
    programs = programs_of(model, choosers(VOCABULARY), chunks=(0, CHUNK), tile=4, blocks=9)
    engine = Engine(ModelDevice(programs, VOCABULARY))
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "bad_tokens": ((TOKEN,),)}
    clients = [
        client([5, 17], 1, [9, 30], **ask),
        client([5, 17], 2, [9, 30], **ask),
        client([5, 17], 1, [9, 30, 4], **ask),
        client(3, [8], **ask),
        client([7, 7, 7, 7, 7, 7, 7], 1, 2, [3, 8, 8, 1], prompt_logprobs=0, logprobs=0, **ask),
        client([200, 31, 5, 77, 120], **ask),
        client([6], 2, [12, 12, 12, 12, 12, 12], 1, [2], **ask),
        client([5, 17], 2, [9, 30, 4, 4], **ask),
    ]
    serve(engine, *clients)
    logits = logits_of(model, clients)
    for asking, row in zip(clients, logits, strict=True):
        first, count = len(asking.request.prompt) - 1, len(asking.answer.tokens)
        assert count == min(6, LENGTH - first - 1)
        assert list(asking.answer.tokens) == np.delete(row, TOKEN, axis=-1)[first : first + count].argmax(-1).tolist()
    scored, logprobs = clients[4], np.asarray(jax.nn.log_softmax(logits[4]))
    prompt, tokens = scored.request.prompt, scored.answer.tokens
    expected = [logprobs[place, token] for place, token in enumerate(prompt[1:])]
    np.testing.assert_allclose([score.logprob for score in scored.answer.prompt_scores[1:]], expected, atol=1e-5)
    expected = [logprobs[len(prompt) - 1 + place, token] for place, token in enumerate(tokens)]
    np.testing.assert_allclose([score.logprob for score in scored.answer.scores], expected, atol=1e-5)
    if not sizes:
        statistics = engine.statistics()
        assert statistics.preemptions_total > 0 and statistics.shared_tokens_total > 0
    # Equal texts with other images give other answers, and their blocks are not shared.
    assert clients[0].answer.tokens != clients[1].answer.tokens
    idle(engine)


def test_blocks_are_shared_by_equal_images_alone() -> None:
    engine = Engine(StandIn(images=ImageInput(SLOTS, COUNT, TOKEN, SIZE, SIZE), vocabulary=VOCABULARY))
    block, shared = engine.device.block, []
    for number in (1, 1, 2):
        asking = client([5] * block, number, [9] * 2 * block, max_tokens=1)
        serve(engine, asking)
        shared.append(asking.answer.shared)
    whole = (block + COUNT + 2 * block - 1) // block * block
    assert shared == [0, whole, block]


def test_images_that_do_not_fit_are_refused() -> None:
    texts = Engine(StandIn(vocabulary=VOCABULARY))
    engine = Engine(StandIn(images=ImageInput(SLOTS, COUNT, TOKEN, SIZE, SIZE), vocabulary=VOCABULARY))
    misplaced = client([1], 1, [2])
    misplaced.request.images = (image(1, 0),)
    without = client([1], 1, [2])
    without.request.images = ()
    for refusing, asking, field in (
        (texts, client([1], 1), "images"),
        (engine, client(1, 2, 3), "images"),
        (engine, misplaced, "prompt"),
        (engine, without, "prompt"),
    ):
        demand_refused(refusing, asking, field)
