"""A draft model from a folder or a run: its engine, its part of the memory, and models that do not fit."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import write_llama
from test_loading_for_generation import loaded

import megajax as mj
from megajax.config.errors import ConfigError, UserError
from megajax.convert import main as convert
from megajax.generate import main as generate
from megajax.inference.assembly import FreeMemory, cache_size
from megajax.inference.completion import complete
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice
from megajax.inference.sampling_settings import Sampling
from megajax.inference.server.server import _drafts
from megajax.interop.draft_model import demand_same_tokens, load_draft
from megajax.interop.loading import start_engine
from megajax.interop.origin import Origin, draft_origin
from megajax.tokenizers.config import ByteTokenizerConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base: a model; small: a draft model, also as a run; odd: one with heads that 2 devices do not divide."""
    folder = tmp_path_factory.mktemp("drafts")
    write_llama(folder / "base", dtype=np.float32)
    write_llama(folder / "small", dtype=np.float32, num_hidden_layers=1)
    write_llama(folder / "odd", np.float32, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3)
    assert convert([f"--from=hf:{folder / 'small'}", f"--to={folder / 'run'}"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_draft_model_changes_no_answer(folder: Path, tensor: int, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [(tuple(range(number, number + 9)), Sampling(max_tokens=16, seed=number)) for number in range(4)]
    model, texts = loaded(Origin(hf=folder / "base"), tensor=tensor, speculate=3), []
    sharded = {"itself": Origin(hf=folder / "base"), "odd": Origin(hf=folder / "odd")}
    origins = sharded if tensor == 2 else {"run": Origin(run=folder / "run")}
    for name, origin in {None: None, **origins}.items():
        draft = None if origin is None else load_draft(model, origin)
        engine = start_engine(model, queue=8, draft=draft)
        texts.append([answer.tokens for (answer,) in complete(engine, prompts)])
        counts = engine.statistics()
        if draft is not None:
            assert counts.drafted_tokens_total > 0 and isinstance(engine.device, ModelDevice)
            assert (counts.accepted_tokens_total == counts.drafted_tokens_total) == (name == "itself")
            text = _drafts(engine.device.programs)
            assert text.startswith("3 tokens in a step, by a model with ") and draft.where in text
            layout = "whole on each device" if name == "odd" else "sharded as the model is"
            assert text.endswith(f", {layout}") == (tensor == 2)
    assert all(tokens == texts[0] for tokens in texts)
    assert "warning" not in capsys.readouterr().err


def test_both_caches_share_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(Origin(hf=folder / "base"), speculate=2)
    draft = load_draft(model, Origin(hf=folder / "small"))
    config = replace(model.config.inference, cache_tokens=None)
    # A token: 3 + 1 layers x keys and values x 2 heads x 4 elements x 4 bytes.
    of_block = 16 * (3 + 1) * 2 * 2 * 4 * 4
    monkeypatch.setattr("megajax.inference.assembly.free_memory", lambda devices: FreeMemory(of_block * 100, True))
    assert cache_size(config, 32, [model.model, draft.model], "float32").blocks == 90
    unlimited = model._replace(config=replace(model.config, inference=config))
    assert start_engine(unlimited, queue=1, draft=draft).device.blocks == 90


def test_models_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = loaded(Origin(hf=folder / "base"), speculate=2)
    write_llama(tmp_path / "ids", vocab_size=41)
    with pytest.raises(UserError, match=r"draft model .*ids has 41 tokens, the model 40: use one with the same tok"):
        load_draft(model, Origin(hf=tmp_path / "ids"))
    write_llama(tmp_path / "short", max_position_embeddings=16)
    with pytest.raises(UserError, match=r"has rows of 16 tokens, .*inference\.length=32: set inference\.length=16"):
        load_draft(model, Origin(hf=tmp_path / "short"))
    write_llama(tmp_path / "large", num_hidden_layers=4)
    load_draft(model, Origin(hf=tmp_path / "large"))
    assert re.search(r"warning: .*large has 11\.9k weights, more than the 9,968 of the model", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("drafting", "message"),
    [(replace(mj.mamba2("130m"), vocabulary_size=40), "layers with a state per request"),
     (replace(mj.t5("small"), vocabulary_size=40), "T5Config, an encoder-decoder model: use a decoder")],
)  # fmt: skip
def test_models_of_other_kinds_are_refused(
    folder: Path, drafting: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(Origin(hf=folder / "base"), speculate=2)
    source = SimpleNamespace(base=replace(model.config, model=drafting))
    monkeypatch.setattr("megajax.interop.draft_model.generation_config", lambda origin, root: source)
    with pytest.raises(UserError, match=f"draft model {folder} (has|is) {message}"):
        load_draft(model, Origin(hf=folder))


def test_other_tokens_are_refused() -> None:
    tokens, other = ByteTokenizerConfig().build(), ByteTokenizerConfig().build()
    model: Any = SimpleNamespace(config=SimpleNamespace(model=mj.gpt2("124m", vocabulary_size=257)), tokenizer=tokens)
    other.identity, other.table = "other", [*tokens.table]
    demand_same_tokens("here", 257, other, model)
    other.table[98] = b"B"
    with pytest.raises(UserError, match=r"token 98 of the draft model here is b'B', that of the model b'b': use one"):
        demand_same_tokens("here", 257, other, model)


def test_flags(folder: Path) -> None:
    flags = {"draft_run": None, "draft_hf": None, "trust_code": True, "ignore": ("a",)}
    drafting = InferenceConfig(speculate=2)
    assert draft_origin(flags, InferenceConfig()) is None
    assert draft_origin({**flags, "draft_hf": folder}, drafting) == Origin(hf=folder, trusted=True, ignore=("a",))
    with pytest.raises(ConfigError, match=r"--draft-run: is given, and --draft-hf=.* as well"):
        draft_origin({**flags, "draft_hf": folder, "draft_run": folder}, drafting)
    with pytest.raises(ConfigError, match=r"inference\.drafts: is mtp, and --draft-hf=.* is given"):
        draft_origin({**flags, "draft_hf": folder}, replace(drafting, drafts="mtp"))
    with pytest.raises(ConfigError, match=r"(?s)inference\.speculate: is 0, so .*small.*set inference\.speculate=4"):
        generate([f"--hf={folder / 'base'}", f"--draft-hf={folder / 'small'}", "--prompt=1 2"])
