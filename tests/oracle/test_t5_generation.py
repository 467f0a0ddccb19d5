"""T5 of transformers generates through the engine: logits of given answers, and greedy answers."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from compiled_steps import Logits, Row, Step, layout_of, programs_of, step_logits, whole_logits
from flax import nnx
from huggingface_cases import TOLERANCE, arrays, folders, opened, stored
from megatron_cases import Comparison, cases

from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.interop.loading import load, start_engine
from megajax.interop.weights.origin import generation_config

CHUNK = 4


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(folders(lambda kind: kind in ("t5", "mt5"))))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    io, opening, compare = stored(folder), opened(folder), Comparison(case)
    labels, mask = io["labels"], io["attention_mask"].astype(bool)
    start, length = opening.origin.settings["decoder_start_token_id"], labels.shape[1]
    layout, mesh = layout_of()
    cfg = replace(opening.model, encoder_length=mask.shape[1], sequence_length=length)
    weights = jax.tree.map(jax.numpy.asarray, arrays(opening)[0])
    model = LoadedModel(cfg, nnx.eval_shape(lambda: cfg.build(layout)), weights, mesh, layout)
    texts = [ids[read].tolist() for ids, read in zip(io["input_ids"], mask, strict=True)]

    sizes = {"rows": 2, "chunks": (CHUNK,), "blocks": 2 * length, "block": 1, "length": length}
    programs = programs_of(model, [Logits()], **sizes)
    for number, text in enumerate(texts):
        padding = opening.origin.settings["pad_token_id"]
        tokens = [start, *np.where(labels[number] >= 0, labels[number], padding)[:-1].tolist()]
        row = Row(tokens, list(range(number * length, (number + 1) * length)), number, text)
        work = [Step(prompts=[(row, 0, CHUNK)]), *(Step(decode=[(row, at)]) for at in range(CHUNK, length))]
        logits = np.stack([step_logits(programs, [step])[0][2][: cfg.vocabulary_size] for step in work])
        compare.check(f"logits of row {number}", logits, io["logits"][number, CHUNK - 1 :], TOLERANCE)

    compare.finish()

    # As `generate` and `serve` load it: the encoder reads the prompt, and the decoder begins with the folder's token.
    origin = f"hf:{folder}"
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    settings = replace(config.inference, compute="float32", rows=2, chunk=CHUNK, length=length, block=1)
    loaded = load(replace(config, inference=settings, parallel=InferenceParallelConfig(data=1)), origin)
    assert loaded.answer_start == (start,)
    sampling = Sampling(max_tokens=length - 1, temperature=0.0, ignore_eos=True)
    answers = complete(start_engine(loaded, queue=2), [(tuple(text), sampling) for text in texts])
    for text, (answer,) in zip(texts, answers, strict=True):
        leaves = {"encoder_tokens": np.asarray([text]), "tokens": np.asarray([[start, *answer.tokens]])}
        assert list(answer.tokens) == whole_logits(model, **leaves)[0].argmax(-1)[:-1].tolist()
