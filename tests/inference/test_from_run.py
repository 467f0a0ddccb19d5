"""`run.generate` of a notebook: by the present weights, on the mesh of the run."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from user_errors import user_error

import megajax as mj
from megajax.inference.assembly import engine_refusal
from megajax.job import notebook
from megajax.mesh.mesh import find_devices

SMALL = (
    *("model.hidden=64", "model.stack.repeats=1", "model.stack.pattern.0.mlp.ffn=64", "model.sequence_length=32"),
    *("batch.global_size=8", "batch.micro_size=2", "steps=20"),
)


@pytest.fixture(scope="module")
def run() -> Iterator[mj.Run]:
    run = mj.setup(mj.load("quickstart.py", *SMALL, "parallel.tensor=2"), devices=find_devices()[:4])
    yield run
    run.close()


def greedy(run: mj.Run, prompt: str, count: int) -> str:
    """The likeliest tokens by forward passes over whole rows."""
    tokenizer, tokens = run.parts.tokenizer, [*run.parts.tokenizer.encode(prompt)]
    for _ in range(count):
        padded = np.pad(tokens, (0, 32 - len(tokens)))[None]  # One shape, so that it compiles once.
        logits = np.asarray(run.model(padded))[0, len(tokens) - 1, : tokenizer.vocabulary_size]
        tokens.append(int(logits.argmax()))
    return tokenizer.decode(tokens[-count:])


def test_generate_uses_the_present_weights(run: mj.Run) -> None:
    answers = []
    for _ in range(2):
        answers.append(run.generate("def ", max_tokens=8, temperature=0))
        assert answers[-1] == greedy(run, "def ", 8)
        list(run.steps(6))
    assert answers[0] != answers[1], "training has changed the weights"
    assert run.generate("def ", max_tokens=5, seed=1) == run.generate("def ", max_tokens=5, seed=1)
    assert len(run.generate("a" * 20, temperature=0)) <= 12, "a row has 32 tokens"


def test_generate_refuses(run: mj.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with user_error():
        run.generate("def ", temperature=-1)
    with user_error():
        run.generate("a" * 40)
    mesh: Any = SimpleNamespace(shape=dict(run.mesh.shape) | {"pipeline": 2, "context": 4})
    why = "the mesh has pipeline=2 and context=4, an engine shards over data, expert and tensor only"
    assert engine_refusal(run.cfg.model, mesh) == why and engine_refusal(run.cfg.model, run.mesh) is None
    mesh.shape |= {"pipeline": 1, "context": 1, "expert": 2}
    assert engine_refusal(run.cfg.model, mesh) is None
    assert engine_refusal(mj.load("t5.py:debug").model, run.mesh) == "encoder-decoder models continue no text"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        assert engine_refusal(run.cfg.model, run.mesh) == "the run has 2 processes, an engine has one"
    monkeypatch.setattr(notebook, "engine_refusal", lambda *_: why)
    with user_error():
        run.engine(mj.InferenceConfig())


def test_the_names_of_the_package_are_imported_on_use() -> None:
    """Importing megajax is fast, and imports no jax; its names are listed."""
    code = (
        "import sys, megajax as mj; assert {'load', 'setup', 'visualize'} <= set(dir(mj)) and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'megajax' has no attribute 'setups'"):
        _ = mj.setups


def test_setup_refuses_a_checkpoint_that_it_would_not_read() -> None:
    with user_error():
        mj.setup(mj.load("quickstart.py", "checkpoint.load=runs/a"))
