"""Decoders of transformers, of every folder found: logits, losses, greedy tokens, and round trips of all files.

The folders are those of the reference values, and those of decoder_families.tar.xz, which make_decoder_families.py
wrote. Weights and logits of all are in float32.
"""

import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_cases import (
    ENCODERS,
    NEW,
    arrays,
    check_greedy_tokens,
    check_round_trip,
    demand_same_folder,
    folders,
    opened,
    stored,
    suited,
)
from megatron_cases import FOLDER, FURTHER
from megatron_run import OneDevice

from megajax.interop import conversion

FILE = Path(__file__).parent / "decoder_families.tar.xz"
TOLERANCE, DELTA_TOLERANCE = 5e-5, 2e-3
"""Gated delta nets amplify: relative noise of 1e-6 in all weights moves logits of transformers by 1e-3."""
OLDER_STYLE = "config_published_style.json"
"""The settings of config.json as versions of transformers before 5 wrote them."""


@cache
def families() -> list[str]:
    """Names of the folders in the archive."""
    with tarfile.open(FILE) as archive:
        return sorted({name.partition("/")[0] for name in archive.getnames()})


REFERENCES = {
    f"{root.name} {name}": root / "hf" / name
    for root in (FOLDER, FURTHER)
    for name in folders(lambda kind: kind not in ENCODERS, root)
}
QUICK = {"gemma3_text", "llama4_text", "nemotron_h", "qwen3_5_text"}
"""Families with parts that no folder of the reference values has: kinds of layers, of norms and of positions."""
LIKE_OTHERS = {"oracle mixtral", "oracle3 glm4_moe", "oracle3 qwen3_next", "oracle3 gemma3_text"}
"""References whose parts those of QUICK or of deepseek_v3 have too."""
STATES = {"bloom", "falcon_mamba", "gemma2", "granitemoehybrid", "kimi_linear", "lfm2_moe", "minimax", "opt", "youtu"}
"""With nemotron_h, llama4_text and qwen3_5_text each kind of state and of positions that a decoder steps with."""


def marked(names: Any, quick: set[str]) -> list[Any]:
    """Parameters of a test, all of them slow but for the quick ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    with tarfile.open(FILE) as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(params=marked([*families(), *REFERENCES], QUICK | {*REFERENCES} - LIKE_OTHERS))
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return REFERENCES.get(request.param, root / request.param)


def tolerance(folder: Path, logits: np.ndarray) -> float:
    """The largest difference of logits: in the first set of reference values, relative to the largest logit."""
    if folder.is_relative_to(FOLDER):
        return 1e-5 * np.abs(logits).max()
    return DELTA_TOLERANCE if "linear_attention" in (folder / "config.json").read_text() else TOLERANCE


def test_logits_loss_and_greedy_tokens(folder: Path) -> None:
    """Each next token is the likeliest after those before it, so a whole text equals greedy decoding."""
    opening, io = opened(folder), stored(folder)
    ids = io["input_ids"].astype(np.int32)
    greedy = io.get("greedy", ids[:, :0]).astype(np.int32)
    width = max(ids.shape[1], greedy.shape[1])
    rows = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in (ids, greedy)])
    params, kept = arrays(opening)
    model = OneDevice(suited(opening.model, width))
    actual = model.forward(params, rows, np.roll(rows, -1, axis=1), kept)
    logits, losses = actual["logits"][: len(ids), : ids.shape[1]], actual["per_token_loss"][: len(ids)]
    np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=tolerance(folder, io["logits"]))
    # The balancing loss of transformers treats all layers as one; ours is per layer.
    extra = opening.origin.settings["router_aux_loss_coef"] * float(io["aux_loss"]) if "aux_loss" in io else 0.0
    if "loss" in io:
        np.testing.assert_allclose(losses[:, : ids.shape[1] - 1].mean(), io["loss"] - extra, rtol=1e-5, atol=0)
    if "greedy" in io:
        start = greedy.shape[1] - NEW
        likeliest = actual["logits"][len(ids) :, start - 1 : greedy.shape[1] - 1].argmax(-1)
        np.testing.assert_array_equal(likeliest, greedy[:, start:])


PARTS = {
    f"{name} {part}": (path, f"{part}/")
    for name, path in REFERENCES.items()
    for part in ("packed", "long")
    if f"{part}/logits.npy" in np.load(path / "io.npz").zip.namelist()
}


@pytest.mark.skipif(not PARTS, reason=f"no long rows and no rows of several documents at {FURTHER}")
@pytest.mark.parametrize("case", marked(PARTS, {"oracle3 phi3_longrope long", "oracle3 olmo2 packed"}))
def test_long_rows_and_rows_of_several_documents(case: str) -> None:
    """Documents of a row have the logits of each alone, also where no chunk of a delta rule divides their lengths."""
    folder, part = PARTS[case]
    opening, io = opened(folder), stored(folder)
    ids, segments = io[f"{part}input_ids"].astype(np.int32), io.get(f"{part}segment_ids")
    params, kept = arrays(opening)
    model = OneDevice(suited(opening.model, ids.shape[1]))
    actual = model.forward(params, ids, np.roll(ids, -1, axis=1), kept, segments)
    expected = io[f"{part}logits"]
    np.testing.assert_allclose(actual["logits"], expected, rtol=0, atol=tolerance(folder, expected))


STEPPED = sorted(STATES | {"nemotron_h", "llama4_text", "qwen3_5_text"})


@pytest.mark.parametrize("name", marked([*STEPPED, "oracle llama", "oracle mamba2"], {"oracle llama", "oracle mamba2"}))
def test_greedy_tokens_of_the_engine(name: str, root: Path) -> None:
    """Prompts in chunks have the stored answers."""
    if name not in REFERENCES and name not in families():
        pytest.skip(f"no reference values at {FOLDER}: set MEGAJAX_ORACLE_DIR")
    check_greedy_tokens(REFERENCES.get(name, root / name))


@pytest.mark.parametrize("name", [*families(), *REFERENCES])
def test_both_styles_of_config_json_are_read_and_kept(name: str, root: Path, tmp_path: Path) -> None:
    """They describe the same model, whose export has every byte and every setting of the folder, in its style."""
    folder, models = REFERENCES.get(name, root / name), []
    shutil.copytree(folder, tmp_path / "older", ignore=shutil.ignore_patterns("io.npz"))
    if (folder / OLDER_STYLE).exists():
        shutil.copy(folder / OLDER_STYLE, tmp_path / "older" / "config.json")
    for source in (folder, tmp_path / "older"):
        opening, copy = conversion.open_source(f"hf:{source}"), tmp_path / f"{source.name}_copy"
        conversion.write(opening, f"hf:{copy}", conversion.Options(), lambda elements: None)
        demand_same_folder(source, copy)
        models.append(opening.model)
    assert models[0] == models[1]


@pytest.mark.parametrize("name", marked(["glm", "nemotron_h", "qwen3_5_text"], {"glm"}))
def test_a_run_reproduces_the_folder(name: str, root: Path, tmp_path: Path) -> None:
    check_round_trip(root / name, tmp_path)
