"""Decoders of transformers: greedy tokens by the engine, from prompts in chunks, in float32."""

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_cases import folders, stored
from megatron_cases import cases, unsupported

from megajax.config.errors import UserError
from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.engine import complete
from megajax.inference.sampling_settings import Sampling
from megajax.interop.loading import load, start_engine
from megajax.interop.origin import Origin, generation_config

ELSEWHERE = ("bert", "megatron-bert", "t5", "mt5", "vit")
NEW = 8
"""Tokens of an answer."""


@pytest.mark.parametrize("case", cases(folders(lambda kind: kind not in ELSEWHERE)))
def test_greedy_tokens(case: str, oracle_dir: Path) -> None:
    origin = Origin(hf=oracle_dir / "hf" / case)
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    settings = replace(config.inference, compute="float32", rows=2, chunk=6, block=4, cache_tokens=64)
    parallel = InferenceParallelConfig(data=1)
    try:
        loaded = load(replace(config, inference=settings, parallel=parallel), origin)
    except UserError as error:
        if "cannot generate text" in str(error):
            unsupported(str(error))
        raise
    greedy = stored(origin.hf or Path())["greedy"].tolist()
    prompts = [row[:-NEW] for row in greedy]
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    engine = start_engine(loaded, queue=len(prompts))
    answers = complete(engine, [(tuple(prompt), sampling) for prompt in prompts])
    assert [list(answer.tokens) for (answer,) in answers] == [row[-NEW:] for row in greedy]
