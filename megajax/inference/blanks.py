"""Blanks in a text, filled by a trained model: a token each for BERT, spans of tokens for T5."""

import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.display.text import visible
from megajax.inference.sample import TrainedRun

PRINTED_TOKENS = 128
"""Number of tokens printed of a row."""
MAX_ROWS = 8
"""Number of rows searched for a blank."""
GUESSES = 3
"""Number of likely tokens printed for a blank."""
SECONDS = 20.0
"""Time limit of generating spans."""
WIDTH = 110
SENTINEL = re.compile(r"<extra_id_(\d+)>")
MASK = re.compile(re.escape("[MASK]"))

type Model = Callable[..., Any]
"""Leaves of rows by name, each [1, ...] -> logits [1, S, V]."""


def sample_blanks(run: TrainedRun, folder: Path) -> str | None:
    """Fill the blanks, written [MASK], of the config's prompt, or else of a validation row; None without either."""
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
    """The first of a few rows that has a blank; else the first row."""
    rows = map(valid.__getitem__, range(min(len(valid), MAX_ROWS)))
    return next((row for row in rows if np.isin(row[name], list(blanks)).any()), valid[0])


def padded_row(tokens: Sequence[int], pad: int, length: int) -> dict[str, np.ndarray]:
    """A row with a single segment for BERT, truncated to `length`."""
    tokens, row = tokens[:length], np.full(length, pad, np.int32)
    row[: len(tokens)] = tokens
    segments = (np.arange(length) < len(tokens)).astype(np.int32)
    return {"tokens": row, "segment_ids": segments, "token_types": np.zeros(length, np.int32)}


def blanks_text(model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], truth: Mapping[int, int]) -> str | None:
    """The text of a row, and for each blank the likeliest tokens with their probabilities, and the true token.

    leaves: `tokens` and others, int32 [1, S]; truth: position -> token, if known. For a text without blanks, a note.
    """
    tokens = leaves["tokens"][0]
    places = np.flatnonzero(tokens[:PRINTED_TOKENS] == tokenizer.specials["mask"])
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
    positions = [place for place, token in enumerate(tokens[:PRINTED_TOKENS].tolist()) if token not in hidden]
    text = _with_numbers([(int(tokens[place]), numbers.get(place)) for place in positions], tokenizer)
    return _blanks_report(text, rows)


def sample_spans(run: TrainedRun, folder: Path) -> str | None:
    """Fill the blanks, <extra_id_0> etc., of the config's prompt, or else of a validation row; None without either.

    For a text without blanks, generate an answer, for example a translation.
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
        encoder_input = {"encoder_tokens": row["tokens"], "encoder_segment_ids": row["segment_ids"]}
    elif valid is not None:
        row = _first_with(valid, "encoder_tokens", sentinels)
        encoder_input = {name: row[name] for name in ("encoder_tokens", "encoder_segment_ids")}
        truth = row["labels"][row["loss_mask"] > 0].tolist()
    else:
        return None
    leaves = {name: leaf[None] for name, leaf in encoder_input.items()}
    return spans_text(run.model, tokenizer, leaves, truth, length=schema["tokens"].shape[0])


def spans_text(
    model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], truth: Sequence[int], *, length: int
) -> str | None:
    """The encoder's text, and for each blank the text generated by the decoder, with the true text.

    leaves: of the encoder, int32 [1, T]; truth: sentinels and their spans, if known; length: positions of the decoder.
    """
    text, sentinels = leaves["encoder_tokens"][0][:PRINTED_TOKENS].tolist(), np.asarray(tokenizer.sentinels).tolist()
    numbers = {token: sentinels.index(token) + 1 for token in text if token in sentinels}
    answer = greedy(model, tokenizer, leaves, length=length)
    if not numbers:
        content = "what the model writes" + (", then the true text" if truth else "")
        texts = (f"  {textwrap.fill(_plain(tokens, tokenizer), WIDTH)}" for tokens in [answer, *[truth] * bool(truth)])
        encoder_text = textwrap.fill(_plain(text, tokenizer), WIDTH)
        return visible("\n".join([f"sample (a text; {content}):", encoder_text, *texts])) + "\n"
    predicted = split_spans(answer, sentinels)
    expected = split_spans(truth, sentinels)
    rows = [(_plain(predicted.get(blank), tokenizer), _plain(expected.get(blank), tokenizer)) for blank in numbers]
    shown_tokens = [(token, numbers.get(token)) for token in text if token != tokenizer.pad]
    return _blanks_report(_with_numbers(shown_tokens, tokenizer), rows, [str(number) for number in numbers.values()])


def greedy(
    model: Model, tokenizer: Any, leaves: Mapping[str, np.ndarray], *, length: int, seconds: float = SECONDS
) -> list[int]:
    """Greedy decoding by full forward passes, up to [EOS], `length` tokens or the time limit."""
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
    """Sentinel -> the tokens after it; if a sentinel is repeated, after its first occurrence."""
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
    """The tokens of a text between its blanks, and those of the blanks, which tokenizers would encode as plain text."""
    start = 0
    for match in blank.finditer(prompt):
        yield tokenizer.encode(prompt[start : match.start()]).tolist()
        yield [token_of(match)]
        start = match.end()
    yield tokenizer.encode(prompt[start:]).tolist()


def _with_numbers(tokens: Sequence[tuple[int, int | None]], tokenizer: Any) -> str:
    """The text of tokens, with numbers in place of blanks."""
    parts, run = [], []
    for token, number in tokens:
        if number is None:
            run.append(token)
            continue
        parts += [tokenizer.decode(run), f"__{number}__"]
        run = []
    return " ".join(word for word in [*parts, tokenizer.decode(run)] if word)


def _plain(tokens: Sequence[int] | None, tokenizer: Any) -> str:
    if tokens is None:
        return "-"
    ids = [token for token in tokens if token not in (tokenizer.specials["eos"], tokenizer.pad)]
    return tokenizer.decode(ids) or "nothing"


def _blanks_report(text: str, rows: Sequence[tuple[str, str]], numbers: Sequence[str] | None = None) -> str:
    """The text, and a line for each blank: its number, the model's text, and the true text if known."""
    has_truth = any(truth and truth != "-" for _, truth in rows)
    labels = numbers or [str(number) for number in range(1, len(rows) + 1)]
    width = max(len(guess) for guess, _ in rows)
    content = "the model's words, then the true ones" if has_truth else "the model's words"
    lines = [f"sample (a text with blanks; {content}):", textwrap.fill(text, WIDTH)]
    for label, (guess, truth) in zip(labels, rows, strict=True):
        lines.append(f"  {label:>3}  {guess:<{width}}  {truth if has_truth else ''}".rstrip())
    return visible("\n".join(lines)) + "\n"
