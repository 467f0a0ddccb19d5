"""A short text from a model, by whole forward passes: for a look at a run, not for serving."""

import time
from collections.abc import Callable

import numpy as np

from megajax.config.errors import UserError
from megajax.metrics.text import visible
from megajax.tokenizers.base import Tokenizer

PROMPT, SAMPLE = 32, 256
"""Most tokens taken as the prompt, and most made."""
WINDOW = 256
"""Most tokens a forward pass sees."""


def text_sample(
    model: Callable[[np.ndarray], np.ndarray],
    tokenizer: Tokenizer,
    row: np.ndarray,
    *,
    length: int,
    seed: int,
    temperature: float = 0.7,
    seconds: float = 20.0,
) -> str | None:
    """A prompt and what the model makes of it, a bar between them; None for a tokenizer without text.

    Control characters are written out (metrics.text.visible): models over bytes make all of them.

    model: int32 [1, S] -> logits [1, S, V]; row: int32 [any], its beginning is the prompt; length: positions the model
    was trained on; stops after `seconds`.
    """
    prompt = [int(token) for token in row[: min(PROMPT, length // 2)]]
    made = generate(
        model,
        prompt,
        vocabulary=tokenizer.vocabulary_size,
        window=min(WINDOW, length),
        count=SAMPLE,
        eod=tokenizer.eod,
        seed=seed,
        temperature=temperature,
        seconds=seconds,
    )
    try:
        text = visible(f"{tokenizer.decode(prompt)}\u2502{tokenizer.decode(made)}")
    except (UserError, UnicodeDecodeError, KeyError, ValueError):
        return None
    return f"sample (the prompt, then the model at temperature {temperature:g}):\n{text}\n"


def generate(
    model: Callable[[np.ndarray], np.ndarray],
    prompt: list[int],
    *,
    vocabulary: int,
    window: int,
    count: int,
    eod: int,
    seed: int,
    temperature: float,
    seconds: float,
) -> list[int]:
    """Up to `count` tokens after `prompt`, drawn from softmax(logits / temperature) among ids below `vocabulary`.

    Ends early at `eod` and after `seconds`.
    """
    draw, deadline, tokens = np.random.default_rng(seed), time.monotonic() + seconds, list(prompt)
    while len(tokens) < len(prompt) + count and time.monotonic() < deadline:
        seen = tokens[-window:]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(seen)] = seen
        logits = np.asarray(model(padded)[0, len(seen) - 1, :vocabulary], np.float64) / temperature
        weights = np.exp(logits - logits.max())
        token = int(draw.choice(len(weights), p=weights / weights.sum()))
        if token == eod:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
