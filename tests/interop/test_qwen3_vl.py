"""Qwen3-VL: the logits and greedy tokens of transformers, which make_qwen3_vl.py stored, and round trips."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hugging_face_folders import read_all
from PIL import Image
from tiny_encoders import document_leaves
from tiny_runs import QUICK

from megajax.data.images.transforms import patch_image
from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.images import ImageReader, ReadImage, image_input
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.interop.huggingface.format import config_for
from megajax.interop.huggingface.registry import families, lost_settings
from megajax.interop.loading import load, start_engine
from megajax.interop.weights.foreign import demand_fit
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.origin import generation_config
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.models.presets.qwen import qwen3_vl

IMAGE, ROWS, TOLERANCE = 120, ("text", "one", "several", "start", "end"), 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of transformers, and rows.npz."""
    path = tmp_path_factory.mktemp("qwen3_vl")
    with tarfile.open(Path(__file__).with_name("qwen3_vl.tar.xz")) as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(scope="module")
def stored(folder: Path) -> StoredModel:
    return open_stored(f"hf:{folder}")


class ArrayPicture:
    """An array as a picture."""

    def __init__(self, pixels: np.ndarray):
        self.size, self._pixels = (pixels.shape[1], pixels.shape[0]), pixels

    def rgb(self, least: tuple[float, float]) -> Any:
        del least
        return Image.fromarray(self._pixels)


def pictures(model: Any, rows: Any, name: str) -> list[ReadImage]:
    """The images of a row."""
    count = sum(key.startswith(f"{name}.picture.") for key in rows)
    patches = model.schema()["images"].placeholder.patches
    read = [patch_image(ArrayPicture(rows[f"{name}.picture.{number}"]), patches) for number in range(count)]
    return [ReadImage(*picture) for picture in read]


PACKED = (("text", "one", "several"), ("start", "end"))
"""The rows of a batch: texts of transformers' rows."""


def batch_of(model: Any, rows: Any, masks: Any) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, slice]]]:
    """The leaves of `PACKED`, and the place of each text."""
    length, places = model.sequence_length, {}
    leaves = {name: np.zeros((2, *leaf.shape), leaf.dtype) for name, leaf in model.schema().items()}
    for number, names in enumerate(PACKED):
        patches, grids, lengths = list[np.ndarray](), list[tuple[int, int]](), list[int]()
        for name in names:
            for slot, picture in enumerate(pictures(model, rows, name)):
                assert picture.grid == tuple(rows[f"{name}.grids"][slot][1:])
                patches, grids = [*patches, picture.pixels], [*grids, picture.grid]
            tokens, start = rows[f"{name}.tokens"], sum(lengths)
            place = places[name] = (number, slice(start, start + len(tokens)))
            leaves["tokens"][place], leaves["loss_mask"][place] = tokens, np.append(masks[f"{name}.loss_mask"], 0)
            leaves["labels"][place] = np.append(tokens[1:], 0)
            lengths.append(len(tokens))
        for name, values in document_leaves(lengths, length).items():
            leaves[name][number] = values
        pixels = np.concatenate(patches)
        leaves["images"][number, : len(pixels)], leaves["grids"][number, : len(grids)] = pixels, grids
    return leaves, places


def test_logits_and_gradients(folder: Path, stored: StoredModel) -> None:
    """Rows have text, one image, several of different sizes, and images at both ends of a text.

    No text reads another text of its row."""
    rows, truth = np.load(folder / "rows.npz"), np.load(Path(__file__).with_name("qwen3_vl_gradients.npz"))
    tower = replace(stored.model.vision, budget=4 * stored.model.vision.most)
    model = replace(stored.model, vision=tower, sequence_length=64, recompute="none")
    leaves, places = batch_of(model, rows, truth)
    parallel, read = ParallelConfig(data=1, data_sharding="replicate"), ("tokens", "positions", "segment_ids")
    abstract = nnx.eval_shape(lambda: model.build(Layout(Plan.of(parallel))))

    def loss(weights: Any, leaves: Any) -> tuple[jax.Array, jax.Array]:
        logits = bind(abstract, weights)(**{name: leaves[name] for name in (*read, "images", "grids")})
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), leaves["labels"][..., None], axis=-1)[..., 0]
        return -(scores * leaves["loss_mask"]).sum() / leaves["loss_mask"].sum(), logits

    with jax.set_mesh(build_mesh(parallel, jax.devices()[:1])):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        compiled = step.lower(weights := read_all(stored.weights), leaves).compile(compiler_options=dict(QUICK))
        (mean, logits), gradients = compiled(weights, leaves)
        pixels, first = leaves["images"].copy(), leaves["grids"][0, 0].prod()
        pixels[0, :first] = 255 - pixels[0, :first]
        (_, changed), _ = compiled(weights, leaves | {"images": pixels})
    for name, place in places.items():
        np.testing.assert_allclose(logits[place], rows[f"{name}.logits"], atol=TOLERANCE, rtol=TOLERANCE)
        assert np.array_equal(logits[place], changed[place]) == (name != "one")
    np.testing.assert_allclose(mean, truth["loss"], rtol=1e-5)
    names, tensors = truth["names"].tolist(), {tensor.name: tensor for tensor in stored.foreign.table}
    assert set(names) == set(tensors)
    for number, (name, (size, *sums)) in enumerate(zip(names, truth["sums"], strict=True)):
        pieces = [np.asarray(gradients[piece.path])[piece.index] for piece in tensors[name].pieces]
        gradient = np.asarray(tensors[name].from_weights(pieces), np.float64).ravel()
        signs = np.random.default_rng(number).choice([-1.0, 1.0], (len(sums), gradient.size))
        np.testing.assert_allclose([np.linalg.norm(gradient), *signs @ gradient], [size, *sums], atol=1e-4 * size)


def test_tensors_and_settings_survive(folder: Path, stored: StoredModel) -> None:
    demand_fit(stored.foreign.tensors, stored.foreign.table, stored.foreign.ignored)
    family, recorded = families()["qwen3_vl"], json.loads((folder / "config.json").read_text())
    assert lost_settings(stored.model, family) == []
    settings = config_for(stored.model, family, recorded, [])
    assert {name: settings.get(name) for name in recorded} == recorded
    weights = read_all(stored.weights)
    for tensor in stored.foreign.table:
        back = tensor.from_weights([weights[piece.path][piece.index] for piece in tensor.pieces])
        there = stored.foreign.tensors.read(tensor.name)
        assert (back.dtype, back.shape, back.tobytes()) == (there.dtype, there.shape, there.tobytes()), tensor.name


@pytest.mark.slow
def test_greedy_tokens_of_the_engine(folder: Path) -> None:
    """The prompts are read in chunks, which cut images."""
    origin, rows = f"hf:{folder}", np.load(folder / "rows.npz")
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    settings = replace(config.inference, compute="float32", rows=2, chunk=6, block=4, cache_tokens=256)
    loaded = load(replace(config, inference=settings, parallel=InferenceParallelConfig(data=1)), origin)
    model = open_stored(f"hf:{folder}").model
    engine, images = start_engine(loaded, queue=8), image_input(model)
    assert images is not None
    reader = ImageReader(images, "crop", 2**24)
    sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, bad_tokens=((IMAGE,),))
    for name in ROWS:
        read, tokens = pictures(model, rows, name), rows[f"{name}.tokens"].tolist()
        counts, short = iter([rows_ * columns // 4 for _, (rows_, columns) in read]), list[int]()
        while tokens:
            short.append(tokens[0])
            del tokens[: next(counts) if tokens[0] == IMAGE else 1]
        prompt, placed = reader.place(short, read)
        assert prompt == rows[f"{name}.tokens"].tolist()
        ((answer,),) = complete(engine, [(tuple(prompt), sampling)], images=placed)
        assert list(answer.tokens) == rows[f"{name}.greedy"].tolist(), name


def test_totals_of_the_released_weights() -> None:
    totals = {size: qwen3_vl(size).parameter_count().total for size in ("2b", "4b", "8b", "32b")}
    assert totals == {"2b": 2_127_532_032, "4b": 4_437_815_808, "8b": 8_767_123_696, "32b": 33_357_390_064}
