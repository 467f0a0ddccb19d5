"""Text with blanks, and what a trained model puts into them: for BERT one token each, for T5 spans of tokens."""

import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.inference.sample import Trained
from megajax.text import visible

SHOWN = 128
"""Tokens of a row that are shown, from its start."""
TRIED = 8
"""Rows that are looked at for one with a blank."""
GUESSES = 3
"""Most likely tokens that are shown for a blank."""
SECONDS = 20.0
"""Time for generating spans."""
WIDTH = 110
SENTINEL = re.compile(r"<extra_id_(\d+)>")
MASK = re.compile(re.escape("[MASK]"))

type Model = Callable[..., Any]
"""Leaves of rows by name, each [1, ...] -> logits [1, S, V]."""


def sample_blanks(run: Trained, folder: Path) -> str | None:
    """Fills the blanks, written [MASK], of the config's prompt or else of a validation row; None without either."""
    del folder
    tokenizer, valid, schema = run.parts.tokenizer, run.parts.splits.valid, run.cfg.model.schema()
    prompt, mask = run.cfg.logging.prompt, tokenizer.specials.get("mask")
    if mask is None:
        return "no blanks are shown: the tokenizer has no mask token"
    if prompt:
        text = [token for piece in _pieces(prompt, MASK, tokenizer, lambda _: mask) for token in piece]
        row = padded_row(
            [tokenizer.specials["cls"], *text, tokenizer.specials["sep"]], tokenizer.pad, schema["tokens"].shape[0]
        )
        truth: dict[int, int] = {}
    elif valid is not None:
        row = _first_with(valid, "tokens", [mask])
        truth = {place: int(row["labels"][place]) for place in np.flatnonzero(row["tokens"] == mask).tolist()}
    else:
        return None
    leaves = {name: row[name][None] for name in ("tokens", "segment_ids", "token_types") if name in schema}
    return blanks_text(run.model, tokenizer, leaves, truth)


def _first_with(valid: Any, name: str, blanks: Sequence[int]) -> Mapping[str, np.ndarray]:
    """The first of a few rows with a blank, since short ones have none; else the first row."""
    rows = map(valid.__getitem__, range(min(len(valid), TRIED)))
    return next((row for row in rows if np.isin(row[name], list(blanks)).any()), valid[0])


def padded_row(tokens: Sequence[int], pad: int, length: int) -> dict[str, np.ndarray]:
    """A row of one part for BERT, cut off at `length`."""
    tokens, row = tokens[:length], np.full(length, pad, np.int32)
    row[: len(tokens)] = tokens
    segments = (np.arange(length) < len(tokens)).astype(np.int32)
    return {"tokens": row, "segment_ids": segments, "token_types": np.zeros(length, np.int32)}


def blanks_text(model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], truth: Mapping[int, int]) -> str | None:
    """The text of a row, and for each blank the likeliest tokens with their probabilities and the true one.

    leaves: `tokens` and others, int32 [1, S]; truth: position -> token, where it is known. None for a tokenizer without
    text; a line that says so for a text without blanks.
    """
    tokens = leaves["tokens"][0]
    places = np.flatnonzero(tokens[:SHOWN] == tokenizer.specials["mask"])
    if not len(places):
        return "no blanks are shown: the text has no [MASK]"
    logits = np.asarray(model(**leaves)[0], np.float64)[places, : tokenizer.vocabulary_size]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = []
    for place, share in zip(places.tolist(), shares, strict=True):
        best = np.argsort(-share, kind="stable")[:GUESSES]
        guesses = ", ".join(f"{tokenizer.decode([token])} {share[token]:.0%}" for token in best.tolist())
        rows.append((guesses, tokenizer.decode([truth[place]]) if place in truth else ""))
    hidden = {tokenizer.specials["cls"], tokenizer.pad}
    numbers = {place: number for number, place in enumerate(places.tolist(), start=1)}
    kept = [place for place, token in enumerate(tokens[:SHOWN].tolist()) if token not in hidden]
    text = _with_numbers([(int(tokens[place]), numbers.get(place)) for place in kept], tokenizer)
    return _shown(text, rows)


def sample_spans(run: Trained, folder: Path) -> str | None:
    """Fills the blanks, <extra_id_0> and so on, of the config's prompt or else of a validation row; None without.

    A text without blanks is answered as a whole, as translations are.
    """
    del folder
    tokenizer, valid, schema = run.parts.tokenizer, run.parts.splits.valid, run.cfg.model.schema()
    prompt, sentinels = run.cfg.logging.prompt, tokenizer.sentinels
    if prompt and SENTINEL.search(prompt) and not len(sentinels):
        return "no blanks are shown: the tokenizer has no sentinels"
    truth: Sequence[int] = ()
    if prompt:
        pieces = _pieces(prompt, SENTINEL, tokenizer, lambda blank: int(sentinels[int(blank[1]) % len(sentinels)]))
        row = padded_row(
            [token for piece in pieces for token in piece], tokenizer.pad, schema["encoder_tokens"].shape[0]
        )
        read = {"encoder_tokens": row["tokens"], "encoder_segment_ids": row["segment_ids"]}
    elif valid is not None:
        row = _first_with(valid, "encoder_tokens", sentinels)
        read = {name: row[name] for name in ("encoder_tokens", "encoder_segment_ids")}
        truth = row["labels"][row["loss_mask"] > 0].tolist()
    else:
        return None
    leaves = {name: leaf[None] for name, leaf in read.items()}
    return spans_text(run.model, tokenizer, leaves, truth, length=schema["tokens"].shape[0])


def spans_text(
    model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], truth: Sequence[int], *, length: int
) -> str | None:
    """The text of a row of the encoder, and for each blank what the decoder writes, with the true words.

    leaves: of the encoder, int32 [1, T]; truth: sentinels and their spans, if known; length: positions of the decoder.
    """
    text, sentinels = leaves["encoder_tokens"][0][:SHOWN].tolist(), np.asarray(tokenizer.sentinels).tolist()
    numbers = {token: sentinels.index(token) + 1 for token in text if token in sentinels}
    answer = greedy(model, tokenizer, leaves, length=length)
    if not numbers:
        what = "what the model writes" + (", then the true text" if truth else "")
        texts = (f"  {textwrap.fill(_plain(tokens, tokenizer), WIDTH)}" for tokens in [answer, *[truth] * bool(truth)])
        read = textwrap.fill(_plain(text, tokenizer), WIDTH)
        return visible("\n".join([f"sample (a text; {what}):", read, *texts])) + "\n"
    written = split_spans(answer, sentinels)
    expected = split_spans(truth, sentinels)
    rows = [(_plain(written.get(blank), tokenizer), _plain(expected.get(blank), tokenizer)) for blank in numbers]
    kept = [(token, numbers.get(token)) for token in text if token != tokenizer.pad]
    return _shown(_with_numbers(kept, tokenizer), rows, [str(number) for number in numbers.values()])


def greedy(
    model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], *, length: int, seconds: float = SECONDS
) -> list[int]:
    """The likeliest token after each, by full forward passes, up to [EOS], `length` tokens or the time."""
    deadline, tokens, ones = time.monotonic() + seconds, [tokenizer.specials["bos"]], np.ones((1, length), np.int32)
    while len(tokens) < length and time.monotonic() < deadline:
        row = np.full((1, length), tokenizer.pad, np.int32)
        row[0, : len(tokens)] = tokens
        logits = np.asarray(model(tokens=row, segment_ids=ones, **leaves)[0, len(tokens) - 1])
        token = int(logits[: tokenizer.vocabulary_size].argmax())
        if token == tokenizer.specials["eos"]:
            break
        tokens.append(token)
    return tokens[1:]


def split_spans(tokens: Sequence[int], sentinels: Sequence[int]) -> dict[int, list[int]]:
    """Sentinel -> the tokens behind it; of a sentinel that comes twice, those of the first time."""
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in tokens:
        if token in sentinels:
            span = []
            spans.setdefault(token, span)
        else:
            span.append(token)
    return spans


def _pieces(
    prompt: str, blank: re.Pattern[str], tokenizer: Any, token_of: Callable[[re.Match[str]], int]
) -> Iterator[list[int]]:
    """The tokens of a text between its blanks, and of the blanks, which tokenizers read as plain text."""
    start = 0
    for match in blank.finditer(prompt):
        yield tokenizer.encode(prompt[start : match.start()]).tolist()
        yield [token_of(match)]
        start = match.end()
    yield tokenizer.encode(prompt[start:]).tolist()


def _with_numbers(tokens: Sequence[tuple[int, int | None]], tokenizer: Any) -> str:
    """The text of tokens, with the numbers of those that are blanks."""
    words, run = [], []
    for token, number in tokens:
        if number is None:
            run.append(token)
            continue
        words += [tokenizer.decode(run), f"__{number}__"]
        run = []
    return " ".join(word for word in [*words, tokenizer.decode(run)] if word)


def _plain(tokens: Sequence[int] | None, tokenizer: Any) -> str:
    if tokens is None:
        return "-"
    known = [token for token in tokens if token not in (tokenizer.specials["eos"], tokenizer.pad)]
    return tokenizer.decode(known) or "nothing"


def _shown(text: str, rows: Sequence[tuple[str, str]], numbers: Sequence[str] | None = None) -> str:
    """The text, and a line for each blank: its number, what the model puts there, what belongs there if known."""
    known = any(truth and truth != "-" for _, truth in rows)
    labels = numbers or [str(number) for number in range(1, len(rows) + 1)]
    width = max(len(guess) for guess, _ in rows)
    what = "the model's words, then the true ones" if known else "the model's words"
    lines = [f"sample (a text with blanks; {what}):", textwrap.fill(text, WIDTH)]
    for label, (guess, truth) in zip(labels, rows, strict=True):
        lines.append(f"  {label:>3}  {guess:<{width}}  {truth if known else ''}".rstrip())
    return visible("\n".join(lines)) + "\n"
