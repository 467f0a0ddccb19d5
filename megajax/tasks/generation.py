"""Greedy generation by recomputation: each token takes a forward pass over the whole text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megajax.config.errors import UserError
from megajax.tokenizers.base import Tokenizer
from megajax.training.scoring import Scorer


@dataclass
class Generation:
    """A text that is being written."""

    prompt: np.ndarray
    """int32 [N], at least one token; its last tokens are read if it does not fit."""
    most: int
    """Most new tokens."""
    until: Sequence[str] = ()
    """The text ends before the first of these."""
    tokens: list[int] = field(default_factory=list)
    done: bool = False

    def take(self, token: int, tokenizer: Tokenizer) -> None:
        """One token more; the end-of-document token ends the text and does not belong to it."""
        if token == tokenizer.eod:
            self.done = True
            return
        self.tokens.append(token)
        text = tokenizer.decode(self.tokens)
        self.done = len(self.tokens) >= self.most or any(stop in text for stop in self.until if stop)

    def text(self, tokenizer: Tokenizer) -> str:
        """What was written, without what stands from a stop on."""
        text = tokenizer.decode(self.tokens) if self.tokens else ""
        ends = [text.index(stop) for stop in self.until if stop and stop in text]
        return text[: min(ends, default=len(text))]


def generate(scorer: Scorer, texts: Sequence[Generation]) -> list[str]:
    """The likeliest token after each text, again and again, until all are done -> what was written.

    Raises UserError where the new tokens leave no room for a prompt.
    """
    for text in texts:
        if not 0 < text.most < scorer.length:
            raise UserError(f"{text.most} tokens to generate: a row of the model has {scorer.length}, prompt included")
    while active := [text for text in texts if not text.done]:
        seen = [np.append(text.prompt[text.most - scorer.length :], text.tokens).astype(np.int32) for text in active]
        for text, token in zip(active, scorer.next_tokens(seen), strict=True):
            text.take(token, scorer.tokenizer)
        scorer.progress(sum(text.done for text in texts), len(texts))
    return [text.text(scorer.tokenizer) for text in texts]
