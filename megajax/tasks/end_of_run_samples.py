"""Sample output of a trained model, printed at the end of its run and in notebooks; by full forward passes."""

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.data.rows.row_source import RowSource
from megajax.display.text import visible
from megajax.tokenizers.base import Tokenizer
from megajax.training.session import Run

PROMPT, SAMPLE, WINDOW = 32, 256, 256
"""Maximum number of prompt tokens, of generated tokens, and of tokens in a forward pass."""
TEMPERATURE, SECONDS = 0.7, 20.0
"""Sampling temperature, and the time limit of generation in seconds."""
PRINTED, SEARCHED, WIDTH = 128, 8, 110
"""Of texts with blanks: printed tokens, rows searched for a blank, and characters of a line."""
CAPTIONS, PRINTED_CAPTIONS, BATCH = 256, 5, 32
"""Number of captions, of printed ones, and of rows of a forward pass."""


def sample(run: Run, folder: Path) -> str | None:
    """The text of the model's sampler; None without a sampler, or without a prompt and validation rows."""
    name = run.cfg.model.sampler()
    if name is None:
        return None
    text = SAMPLERS[name](run) if name in SAMPLERS else resolve(name)(run, folder)
    return text and visible(text)


def sample_continuation(run: Run) -> str | None:
    """Continue the config's prompt, or else the start of a validation row, up to the end-of-document token."""
    cfg, tokenizer, valid = run.cfg, run.parts.tokenizer, run.parts.splits.valid
    if not cfg.logging.prompt and valid is None:
        return None
    row = tokenizer.encode(cfg.logging.prompt) if cfg.logging.prompt else valid[0]["tokens"]
    length = cfg.model.row_positions()
    prompt = [int(token) for token in row[: min(PROMPT, length // 2)]]
    draw, deadline, generated = np.random.default_rng(cfg.seed), time.monotonic() + SECONDS, list[int]()
    while len(generated) < SAMPLE and time.monotonic() < deadline:
        window = min(WINDOW, length)
        tokens = [*prompt, *generated][-window:]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = run.model(padded)[0, len(tokens) - 1, : tokenizer.vocabulary_size]
        weights = np.exp((scaled := np.asarray(logits, np.float64) / TEMPERATURE) - scaled.max())
        token = int(draw.choice(len(weights), p=weights / weights.sum()))
        if token == tokenizer.eod:
            break
        generated.append(token)
    try:
        text = f"{tokenizer.decode(prompt)}\u2502{tokenizer.decode(generated)}"
    except (UserError, UnicodeDecodeError, KeyError, ValueError):
        return "no text sample: the tokenizer has no text"
    return f"sample (the prompt, then the model at temperature {TEMPERATURE:g}):\n{text}\n"


def sample_blanks(run: Run) -> str | None:
    """Fill the masked tokens of a validation row."""
    tokenizer, schema = run.parts.tokenizer, run.cfg.model.schema()
    mask = tokenizer.specials["mask"]
    row = first_with(run.parts.splits.valid, "tokens", [mask])
    if row is None:
        return None
    logits = run.model(**{name: row[name][None] for name in ("tokens", "segment_ids", "token_types") if name in schema})
    likeliest = np.asarray(logits)[0, :, : tokenizer.vocabulary_size].argmax(-1)
    places = np.flatnonzero(row["tokens"] == mask)
    answers = (np.stack([np.full(len(places), mask), ids[places]], 1).ravel() for ids in (likeliest, row["labels"]))
    return report(tokenizer, [mask], row["tokens"], *answers)


def sample_spans(run: Run) -> str | None:
    """Write the decoder's likeliest answer to a validation row: the spans of its blanks, or a translation."""
    tokenizer, sentinels = run.parts.tokenizer, np.asarray(run.parts.tokenizer.sentinels).tolist()
    row = first_with(run.parts.splits.valid, "encoder_tokens", sentinels)
    if row is None:
        return None
    leaves = {name: row[name][None] for name in ("encoder_tokens", "encoder_segment_ids")}
    length, deadline = run.cfg.model.schema()["tokens"].shape[0], time.monotonic() + SECONDS
    answer, ones = [tokenizer.specials["bos"]], np.ones((1, length), np.int32)
    while len(answer) < length and time.monotonic() < deadline and answer[-1] != tokenizer.specials["eos"]:
        tokens = np.full((1, length), tokenizer.pad, np.int32)
        tokens[0, : len(answer)] = answer
        logits = np.asarray(run.model(tokens=tokens, segment_ids=ones, **leaves)[0, len(answer) - 1])
        answer.append(int(logits[: tokenizer.vocabulary_size].argmax()))
    return report(tokenizer, sentinels, row["encoder_tokens"], answer[1:], row["labels"][row["loss_mask"] > 0])


def first_with(rows: RowSource | None, name: str, blanks: Sequence[int]) -> Mapping[str, np.ndarray] | None:
    """The first of a few rows that has a blank; else the first row. None without rows."""
    few = [] if rows is None else [rows[row] for row in range(min(len(rows), SEARCHED))]
    return next((row for row in few if np.isin(row[name], blanks).any()), few[0] if few else None)


def report(tokenizer: Tokenizer, blanks: Sequence[int], *texts: Iterable[int]) -> str:
    """Tokens of a text, of the model's answer and of the true one; with __1__ etc. in place of blanks."""
    hidden, lines = {tokenizer.pad, tokenizer.specials.get("cls"), tokenizer.specials.get("eos")}, list[str]()
    for text in texts:
        words, run, count = list[str](), list[int](), 0
        for token in [int(token) for token in text if int(token) not in hidden][:PRINTED]:
            if token in blanks:
                count = count + 1 if len(blanks) == 1 else blanks.index(token) + 1
                words, run = [*words, tokenizer.decode(run), f"__{count}__"], []
            else:
                run.append(token)
        lines.append(textwrap.fill(" ".join(filter(None, [*words, tokenizer.decode(run)])), WIDTH) or "nothing")
    return "\n  ".join(["sample (a text, what the model writes, then the true answer):", *lines]) + "\n"


def sample_captions(run: Run) -> str | None:
    """Some captions, and the share of validation rows whose every token is the likeliest after the true prefix."""
    valid, tokenizer, correct, lines = run.parts.splits.valid, run.parts.tokenizer, list[bool](), list[str]()
    count = 0 if valid is None else min(CAPTIONS, len(valid))
    for first in range(0, count, BATCH):
        rows = [valid[row] for row in range(first, min(first + BATCH, count))]
        names = [name for name in ("tokens", "positions", "segment_ids", "images", "grids") if name in rows[0]]
        logits = np.asarray(run.model(**{name: np.stack([row[name] for row in rows]) for name in names}))
        for row, likeliest in zip(rows, logits[..., : tokenizer.vocabulary_size].argmax(-1), strict=True):
            pair = [ids[row["loss_mask"] > 0] for ids in (likeliest, row["labels"])]
            correct.append(bool((pair[0] == pair[1]).all()))
            texts = [tokenizer.decode([int(token) for token in ids if token != tokenizer.eod]) for ids in pair]
            lines.append(f"  {texts[0].strip()}   (data: {texts[1].strip()})")
    if not correct:
        return None
    share = f"captions right: {sum(correct)} of {len(correct)} validation rows ({np.mean(correct):.1%})"
    return "\n".join(["captions of validation images:", *lines[:PRINTED_CAPTIONS], share, ""])


SAMPLERS: Mapping[str, Callable[[Run], str | None]] = {
    "blanks": sample_blanks,
    "captions": sample_captions,
    "continuation": sample_continuation,
    "spans": sample_spans,
}
"""Name of `ModelConfig.sampler` -> sampler."""
