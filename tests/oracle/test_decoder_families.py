"""Decoder families of transformers: logits, loss and greedy tokens, and round trips of both styles of config.json."""

import shutil
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from huggingface_cases import arrays, check_greedy_tokens, check_round_trip, opened, stored
from megatron_cases import FOLDER as ORACLE
from megatron_run import OneDevice

from megajax.interop.weights.formats import open_stored

FILE = Path(__file__).parent / "decoder_families.tar.xz"
"""Written by make_decoder_families.py."""
ROOT = ORACLE.parent / "oracle3" / "hf"
LARGER = [name for name in ("gemma3_text", "glm4_moe", "qwen3_next") if (ROOT / name).exists()]
TOLERANCE, DELTA_TOLERANCE = 5e-5, 2e-3
"""Gated delta nets amplify: relative noise of 1e-6 in all weights moves logits of transformers by 1e-3."""


@cache
def names() -> list[str]:
    with tarfile.open(FILE) as archive:
        return sorted({name.partition("/")[0] for name in archive.getnames()})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    with tarfile.open(FILE) as archive:
        archive.extractall(path, filter="data")
    return path


DEFAULT = {
    "gemma3_text", "gemma2", "granite", "phi3", "cohere2", "glm4_moe", "olmo3", "exaone4", "qwen3_5_text", "smollm3",
    "llama4_text", "lfm2", "lfm2_moe", "minimax", "kimi_linear", "nemotron_h",
}  # fmt: skip
SLOW = {*names()} - DEFAULT
"""Parts that other folders have too."""
STATES = {
    "bamba", "bloom", "falcon-alibi", "falcon_mamba", "gpt_bigcode", "gptj", "granitemoehybrid", "jamba", "mpt", "opt",
    "persimmon", "phimoe", "youtu",
}  # fmt: skip
"""With DEFAULT each kind of state, of positions and of mixture: tests/inference has the steps of each layer."""


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names()),
        *(f"oracle3 {name}" for name in LARGER),
    ]
)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    first, _, name = request.param.partition(" ")
    return ROOT / name if name else root / first


@pytest.mark.parametrize("name", sorted(SLOW))
def test_both_styles_of_config_json_and_all_bytes_are_read(name: str, root: Path, tmp_path: Path) -> None:
    """Without a compiler: the others are converted below."""
    published = tmp_path / name
    published.mkdir()
    shutil.copy(root / name / "model.safetensors", published)
    shutil.copy(root / name / "config_published_style.json", published / "config.json")
    assert open_stored(f"hf:{published}").model == opened(root / name).model


def test_logits_and_loss(folder: Path) -> None:
    """`opened` also writes every tensor back, byte for byte."""
    opening, io = opened(folder), stored(folder)
    ids = io["input_ids"].astype(np.int32)
    params, kept = arrays(opening)
    actual = OneDevice(opening.model).forward(params, ids, np.roll(ids, -1, axis=1), kept)
    tolerance = DELTA_TOLERANCE if "linear_attention" in (folder / "config.json").read_text() else TOLERANCE
    np.testing.assert_allclose(actual["logits"], io["logits"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(actual["per_token_loss"][:, :-1].mean(), io["loss"], rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(not ROOT.exists(), reason="needs ../shared")
@pytest.mark.parametrize(("length", "part"), [(40, ""), (256, "long/")])
def test_longrope_has_one_set_of_factors_for_short_texts_and_one_for_long_ones(length: int, part: str) -> None:
    """The original length is 40; the stored logits are of 32 and of 96 tokens."""
    opening, io = opened(ROOT / "phi3_longrope"), stored(ROOT / "phi3_longrope")
    ids, (params, _) = io[f"{part}input_ids"].astype(np.int32), arrays(opening)
    model = replace(opening.model, sequence_length=length)
    actual = OneDevice(model).forward(params, ids, np.roll(ids, -1, axis=1), {})
    np.testing.assert_allclose(actual["logits"], io[f"{part}logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(not ROOT.exists(), reason="needs ../shared")
def test_documents_of_a_row_have_the_logits_of_each_alone() -> None:
    """Documents of 37, 70 and 53 tokens, and 150 tokens: no chunk of the delta rule divides them."""
    opening, io = opened(ROOT / "qwen3_next"), stored(ROOT / "qwen3_next")
    (params, kept), model = arrays(opening), OneDevice(opening.model)
    for part in ("packed/", "long/"):
        ids, segments = io[f"{part}input_ids"].astype(np.int32), io.get(f"{part}segment_ids")
        actual = model.forward(params, ids, np.roll(ids, -1, axis=1), kept, segments)
        np.testing.assert_allclose(actual["logits"], io[f"{part}logits"], rtol=0, atol=DELTA_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*sorted(DEFAULT | STATES), *(f"oracle3 {name}" for name in LARGER)], indirect=True)
def test_greedy_tokens_of_the_engine(folder: Path) -> None:
    check_greedy_tokens(folder)


def test_both_styles_of_config_json_round_trip(folder: Path, tmp_path: Path) -> None:
    """The same model, bytes and settings."""
    published = tmp_path / "published"
    shutil.copytree(folder, published)
    shutil.copy(folder / "config_published_style.json", published / "config.json")
    assert opened(published).model == opened(folder).model
    for source in (folder, published):
        check_round_trip(source, tmp_path)
