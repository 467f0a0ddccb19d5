"""T5 of transformers generates through the engine: logits of given answers, and greedy answers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, cases

from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.programs import CacheSize, LoadedModel, Programs, StepOutput
from megajax.inference.request import Output, Request
from megajax.inference.sampling.chooser import choosers
from megajax.inference.sampling_settings import Sampling
from megajax.inference.step_arrays import Bucket
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan

CHUNK = 4


class Logits(NamedTuple):
    """Gives the logits themselves."""

    def like(self, rows: int, chunk: int) -> tuple[()]:
        del rows, chunk
        return ()

    def __call__(self, layout: Layout, out: StepOutput, inputs: tuple[()]) -> jax.Array:
        del layout, inputs
        return out.logits


@dataclass(eq=False)
class Row:
    memory: list[int]
    tokens: list[int]
    blocks: list[int]
    slot: int


class Step(NamedTuple):
    decode: list[tuple[Row, int]]
    prompts: list[tuple[Row, int, int]]


def programs_of(model: LoadedModel, length: int, ways: Any) -> Programs:
    size = CacheSize(blocks=2 * length, block=1, slots=2)
    buckets = [Bucket(2, CHUNK)]
    return Programs(model, size, buckets=buckets, choosers=ways, length=length, dtype="float32", kernel="tiled")


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in ("t5", "mt5"))))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    io, opening, compare = stored(folder), opened(folder), Comparison(case)
    labels, mask = io["labels"], io["attention_mask"].astype(bool)
    start, length = opening.config["decoder_start_token_id"], labels.shape[1]
    parallel = ParallelConfig(data=1, data_sharding="replicate")
    layout = Layout(Plan.of(parallel))
    cfg = replace(opening.model, encoder_length=mask.shape[1], sequence_length=length)
    weights = jax.tree.map(jax.numpy.asarray, arrays(opening)[0])
    model = LoadedModel(
        cfg, nnx.eval_shape(lambda: cfg.build(layout)), weights, build_mesh(parallel, jax.devices()[:1]), layout
    )
    texts = [ids[read].tolist() for ids, read in zip(io["input_ids"], mask, strict=True)]

    programs = programs_of(model, length, [Logits()])
    for number, text in enumerate(texts):
        padding = opening.origin.settings["pad_token_id"]
        tokens = [start, *np.where(labels[number] >= 0, labels[number], padding)[:-1].tolist()]
        row = Row(text, tokens, list(range(number * length, (number + 1) * length)), number)
        work = [Step([], [(row, 0, CHUNK)]), *(Step([(row, at)], []) for at in range(CHUNK, length))]
        ran = [np.asarray(programs.run([step], Logits(), lambda _: ()).chosen) for step in work]
        logits = np.stack([ran[0][2], *(each[0] for each in ran[1:])])[:, : cfg.vocabulary_size]
        compare.check(f"logits of row {number}", logits, io["logits"][number, CHUNK - 1 :], TOLERANCE)

    pieces: list[Output] = []
    engine = Engine(
        ModelDevice(programs_of(model, length, choosers(cfg.vocabulary_size)), cfg.vocabulary_size), end_tokens=()
    )
    sampling = Sampling(max_tokens=length - 1, temperature=0.0)
    for number, text in enumerate(texts):
        request = Request(identifier=str(number), prompt=(start,), sampling=sampling, deliver=pieces.append)
        request.memory = tuple(text)
        engine.submit(request)
        while engine.step():
            pass
        answer = [token for piece in pieces for token in piece.tokens]
        pieces.clear()
        leaves = {"encoder_tokens": np.asarray([text]), "tokens": np.asarray([[start, *answer]])}
        whole = jax.jit(lambda weights, leaves: bind(model.model, weights)(**leaves))(weights, leaves)
        assert answer == np.asarray(whole)[0].argmax(-1)[:-1].tolist()
    compare.finish()
