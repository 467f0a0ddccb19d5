"""Greedy generation: by an engine with a cache, or by recomputation on layouts that engines do not support."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megajax.config.errors import UserError
from megajax.inference.assembly import engine_of_run, engine_refusal
from megajax.inference.config import InferenceConfig
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.tokenizers.base import Tokenizer
from megajax.training.check_compiler_options import inference_options
from megajax.training.scorer import Scorer, Stopped

ROWS, BLOCK = 16, 16
"""Maximum texts that an engine generates at once on each replica, and tokens of a block of an engine's cache."""


@dataclass
class Generation:
    """A text in generation."""

    prompt: np.ndarray
    """int32 [N], at least one token; only its last tokens are used if it does not fit."""
    most: int
    """Maximum new tokens."""
    until: Sequence[str] = ()
    """Stop texts; the generated text ends before the first of them."""
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    def sampling(self) -> Sampling:
        """The settings of a request to an engine."""
        return Sampling(max_tokens=self.most, temperature=0.0, stop=tuple(filter(None, self.until)))

    def append(self, token: int, tokenizer: Tokenizer) -> None:
        """Add a token. The end-of-document token ends the text and is not part of it."""
        if token == tokenizer.eod:
            self.finished = True
            return
        self.tokens.append(token)
        text = tokenizer.decode(self.tokens)
        self.finished = len(self.tokens) >= self.most or any(stop in text for stop in self.until if stop)

    def text(self, tokenizer: Tokenizer) -> str:
        """The generated text up to the first stop text."""
        text = tokenizer.decode(self.tokens) if self.tokens else ""
        stop_places = [text.index(stop) for stop in self.until if stop and stop in text]
        return text[: min(stop_places, default=len(text))]


def generate(scorer: Scorer, texts: Sequence[Generation]) -> list[str]:
    """The greedy continuation of each text. Raises UserError if the new tokens leave no room for a prompt."""
    scorer.demand_all()
    for text in texts:
        if not 0 < text.most < scorer.length:
            raise UserError(f"{text.most} tokens to generate: a row of the model has {scorer.length}, prompt included")
    if engine_refusal(scorer.program.cfg.model, scorer.program.mesh) is None:
        return by_engine(scorer, texts)
    return by_recomputation(scorer, texts)


def by_engine(scorer: Scorer, texts: Sequence[Generation]) -> list[str]:
    """`generate` with a key-value cache. Raises Stopped."""
    program, eod = scorer.program, scorer.tokenizer.eod
    rows, prompts = min(ROWS, len(texts)), [text.prompt[text.most - scorer.length :].tolist() for text in texts]
    longest = max(len(prompt) + text.most for prompt, text in zip(prompts, texts, strict=True))
    engine = engine_of_run(
        program.cfg,
        scorer.weights,
        program.mesh,
        inference_options(program.cfg.xla, program.mesh.devices.flat[0]),
        scorer.tokenizer,
        InferenceConfig(rows=rows, cache_tokens=rows * (longest + BLOCK)),
        end_tokens={eod},
        length=scorer.length,
        queue=len(texts),
    )
    requests = [(tuple(prompt), text.sampling()) for prompt, text in zip(prompts, texts, strict=True)]
    results = list[str]()
    answers = complete(engine, requests, interrupted=scorer.stopping)
    for text, (answer,) in zip(texts, answers, strict=True):
        if answer.finish == "cancelled":
            raise Stopped
        # Decode the answer alone, as by recomputation: engines decode it as the continuation of its prompt.
        text.tokens = [token for token in answer.tokens if token != eod]
        results.append(text.text(scorer.tokenizer) if answer.text else "")
        scorer.progress(len(results), len(texts))
    return results


def by_recomputation(scorer: Scorer, texts: Sequence[Generation]) -> list[str]:
    """`generate` with a forward pass over the whole texts for each token."""
    while active := [text for text in texts if not text.finished]:
        sequences = [
            np.append(text.prompt[text.most - scorer.length :], text.tokens).astype(np.int32) for text in active
        ]
        for text, token in zip(active, scorer.next_tokens(sequences), strict=True):
            text.append(token, scorer.tokenizer)
        scorer.progress(sum(text.finished for text in texts), len(texts))
    return [text.text(scorer.tokenizer) for text in texts]
