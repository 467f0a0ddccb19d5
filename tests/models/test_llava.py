"""LLaVA inserts images where its rows say, and freezes its tower. tests/one_device.py has layouts."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_encoders import GATED, IMAGE, llava
from tiny_runs import LENGTH, ONE, VOCABULARY, build_program, start, within
from user_errors import user_error

from megajax.batch import Batch, Placeholder
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.layers.context import Context
from megajax.layers.facts import total_size
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.module import DecoderLM
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.llava.module import Llava, VisionSection
from megajax.training.run_config import RunConfig


def rows(model: LlavaConfig, images: int = 1) -> dict[str, np.ndarray]:
    """Two rows; in the first one, `images` of both slots follow the second token."""
    draw, count = np.random.default_rng(0), images * model.image_positions()
    tokens = draw.integers(1, IMAGE, (2, LENGTH)).astype(np.int32)
    tokens[0, 2 : 2 + count] = IMAGE
    return {"tokens": tokens, "images": draw.integers(0, 256, (2, 2, 8, 8, 3), np.uint8)}


def build_model(model: LlavaConfig) -> Llava:
    program = build_program(model, ONE, microbatches=1)
    with within(program):
        return bind(program.abstract, start(program).params)


@pytest.mark.parametrize(
    ("shuffle", "ffn", "keep"), [(2, None, False), pytest.param(1, 0, True, marks=pytest.mark.slow)]
)
def test_images_are_inserted_at_their_tokens(shuffle: int, ffn: int | None, keep: bool) -> None:
    """The decoder gives the same logits on embeddings into which the test inserts the projected images."""
    model = build_model(replace(llava(shuffle=shuffle, ffn=ffn), keep_class_tokens=keep))
    batch = rows(model.cfg, images=2)
    section, answer = VisionSection(model), jax.jit(lambda batch: model(**batch))

    @jax.jit
    def looked_at(batch: Batch) -> jax.Array:
        ctx = section.context(batch, None)
        return section.leave(section.stack(section.enter(section.embed(batch), ctx), ctx), ctx)

    @jax.jit
    def answered(x: jax.Array) -> jax.Array:
        index = jnp.arange(LENGTH)
        ctx = Context(jnp.broadcast_to(index[None], (2, LENGTH)), index)
        return model.logits(model.final_norm(model.stack(DecoderLM.enter(model, x, ctx), ctx)))

    image_states = np.asarray(looked_at(batch))
    positions = 4 // shuffle**2 + keep
    assert image_states.shape == (2, 2 * positions, 32)
    x = np.array(model.embed_tokens(jnp.asarray(batch["tokens"])))
    x[0, 2 : 2 + 2 * positions] = image_states[0]
    expected = answered(x)
    np.testing.assert_allclose(answer(batch), expected, atol=1e-5)
    # The second row has no image: the contents of its slots make no difference.
    changed = {**batch, "images": np.concatenate([batch["images"][:1], 255 - batch["images"][1:]])}
    np.testing.assert_allclose(answer(changed), expected, atol=1e-5)
    changed = {**batch, "images": 255 - batch["images"]}
    assert np.abs(np.asarray(answer(changed))[0] - expected[0]).max() > 1e-3


def test_kept_class_tokens_are_positions_of_the_decoder() -> None:
    model, batch, image_states = build_model(llava()), rows(llava()), {}
    for keep in (False, True):
        model.cfg, section = replace(llava(), keep_class_tokens=keep), VisionSection(model)
        assert model.cfg.schema()["images"].placeholder == Placeholder(IMAGE, 4 + keep)
        assert {side.per_token for side in model.cfg.section_facts()[1].matmuls} == {2 * (4 + keep) / LENGTH}
        # Class token, 2 x 2 patches, padding.
        states = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8, 64)), jnp.float32)
        image_states[keep] = np.asarray(section.leave(states, section.context(batch, None))).reshape(4, 4 + keep, 32)
        first = 0 if keep else 1
        expected = model.projector(model.vision.norm(states[:, first:5]))
        np.testing.assert_allclose(image_states[keep], expected, atol=1e-6)
    np.testing.assert_allclose(image_states[True][:, 1:], image_states[False], atol=1e-6)
    assert np.abs(image_states[True][:, 0] - image_states[True][:, 1]).max() > 1e-3


def test_a_gated_projector_without_biases() -> None:
    model = build_model(replace(llava(), projector=GATED))
    x = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    gate, up, down = (np.asarray(getattr(model.projector, name)[...]) for name in ("gate", "up", "down"))
    expected = ((x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    np.testing.assert_allclose(model.projector(jnp.asarray(x)), expected, atol=1e-5)
    weights, (into, back) = GATED.facts(64, 32, 0.5)
    assert total_size(weights) == 24 * (64 + 64 + 32)
    assert (into.size + back.size, into.per_token) == (24 * (64 + 64 + 32), 0.5)


@cache
def tiny() -> RunConfig:
    return build_program(llava(), ONE, microbatches=1).cfg


@pytest.mark.parametrize(
    "changes",
    [
        {"image_token": VOCABULARY},
        {"slots": 0},
        {"projector": ProjectorConfig(pixel_shuffle=3)},
        {"keep_class_tokens": True, "projector": ProjectorConfig(pixel_shuffle=2)},
        {"projector": ProjectorConfig(ffn=0, gated=True)},
        {"keep_class_tokens": True, "sequence_length": 5},
        {"slots": 5},
        {"sequence_length": 4},
        {"vision": replace(llava().vision, height=9)},
        {"parallel": ParallelConfig(data=1, tensor=3)},
        {"parallel": ParallelConfig(data=1, pipeline=2)},
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: dict) -> None:
    cfg = tiny()
    parallel = changes.pop("parallel", ONE)
    with user_error(kind=ConfigError):
        check(replace(cfg, model=replace(cfg.model, **changes), parallel=parallel), parallel.tensor * parallel.pipeline)


def test_positions_of_another_image_size_are_interpolated() -> None:
    model = replace(llava(), vision=replace(llava().vision, height=16, width=16), sequence_length=64)
    table = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
    sizes = {"height": 8, "width": 8, "patch": 4, "class_tokens": 1, "hidden": 64}
    for settings in ({f"model.vision.{name}": value for name, value in sizes.items()} | {"model.hidden": 32},
                     {f"model.{name}": value for name, value in sizes.items()}):  # fmt: skip
        resized = model.refit("vision.positions", table, settings)
        assert resized.shape == (17, 64)
        np.testing.assert_array_equal(resized[0], table[0])
        np.testing.assert_allclose(resized[1], table[1], atol=1e-5)  # the corner
    assert model.refit("positions", table, settings) is None
