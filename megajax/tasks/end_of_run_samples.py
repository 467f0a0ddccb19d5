"""Sample output of a trained model, printed at the end of its run and in notebooks; by full forward passes.

A model's config names a function (`ModelConfig.sampler`) of the run and its folder. It returns a text to print, and may
write a picture into the folder.
"""

import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.display.charts import Matrix, save_png
from megajax.display.text import visible
from megajax.tokenizers.base import Tokenizer

PROMPT, SAMPLE, WINDOW = 32, 256, 256
"""Maximum number of prompt tokens, of generated tokens, and of tokens in a forward pass."""
TEMPERATURE, SECONDS = 0.7, 20.0
"""Sampling temperature, and the time limit of generation in seconds."""
PRINTED_TOKENS, MAX_ROWS, GUESSES, WIDTH = 128, 8, 3, 110
"""Of texts with blanks: printed tokens of a row, rows searched for a blank, likely tokens printed for a blank, and
characters of a line."""
SENTINEL, MASK = re.compile(r"<extra_id_(\d+)>"), re.compile(re.escape("[MASK]"))
CAPTION_ROWS, PRINTED_CAPTIONS, CAPTION_BATCH = 256, 5, 32
"""Of captions: maximum number of validation rows, number of printed captions, and rows of a forward pass."""
IMAGES, IMAGE_BATCH, MAX_TABLE_CLASSES, PAIRS = 2048, 64, 20, 8
"""Of confusion matrices: maximum number of images, images of a forward pass, maximum number of classes in a table, and
number of pairs in the list for more classes."""
PICTURE = "confusion.png"

type Model = Callable[..., Any]
"""Leaves of rows by name, each [1, ...] -> logits [1, S, V]."""


class TrainedRun(Protocol):
    """A run, for example `megajax.training.session.Run`.

    Attributes:
        cfg: the config of the run.
        parts: its `tokenizer`, and in `splits.valid` the rows of the validation split, or None.
    """

    cfg: Any
    parts: Any

    def model(self, *arrays: Any, **leaves: Any) -> Any:
        """Leaves of rows -> output of the model with the present weights."""
        ...


def sample(run: TrainedRun, folder: Path) -> str | None:
    """The text of the model's sampler; None without a sampler, or without a prompt and validation rows."""
    sampler = run.cfg.model.sampler()
    if sampler is None:
        return None
    return (SAMPLERS.get(sampler) or resolve(sampler))(run, folder)


def sample_continuation(run: TrainedRun, folder: Path) -> str | None:
    """Continue the config's prompt, or else the start of a validation row; None without either."""
    del folder
    cfg, tokenizer, valid = run.cfg, run.parts.tokenizer, run.parts.splits.valid
    if not cfg.logging.prompt and valid is None:
        return None
    row = tokenizer.encode(cfg.logging.prompt) if cfg.logging.prompt else valid[0]["tokens"]
    text = text_sample(run.model, tokenizer, row, length=cfg.model.row_positions(), seed=cfg.seed)
    return text or "no text sample: the tokenizer has no text"


def text_sample(
    model: Callable[[np.ndarray], np.ndarray], tokenizer: Tokenizer, row: np.ndarray, *, length: int, seed: int
) -> str | None:
    """A prompt and its continuation by the model, separated by a bar; None for a tokenizer without text.

    Tokens are sampled from softmax(logits / TEMPERATURE) up to the end-of-document token. Control characters are
    escaped (megajax.display.text.visible), because byte-level models generate all of them.

    model: int32 [1, S] -> logits [1, S, V]; row: int32 [any], which starts with the prompt; length: number of positions
    in training.
    """
    prompt = [int(token) for token in row[: min(PROMPT, length // 2)]]
    draw, deadline, generated = np.random.default_rng(seed), time.monotonic() + SECONDS, list[int]()
    while len(generated) < SAMPLE and time.monotonic() < deadline:
        window = min(WINDOW, length)
        tokens = [*prompt, *generated][-window:]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(model(padded)[0, len(tokens) - 1, : tokenizer.vocabulary_size], np.float64) / TEMPERATURE
        weights = np.exp(logits - logits.max())
        token = int(draw.choice(len(weights), p=weights / weights.sum()))
        if token == tokenizer.eod:
            break
        generated.append(token)
    try:
        text = visible(f"{tokenizer.decode(prompt)}\u2502{tokenizer.decode(generated)}")
    except (UserError, UnicodeDecodeError, KeyError, ValueError):
        return None
    return f"sample (the prompt, then the model at temperature {TEMPERATURE:g}):\n{text}\n"


def sample_blanks(run: TrainedRun, folder: Path) -> str | None:
    """Fill the blanks, written [MASK], of the config's prompt, or else of a validation row; None without either."""
    del folder
    tokenizer, valid, schema = run.parts.tokenizer, run.parts.splits.valid, run.cfg.model.schema()
    prompt, mask = run.cfg.logging.prompt, tokenizer.specials.get("mask")
    if mask is None:
        return "no blanks are shown: the tokenizer has no mask token"
    if prompt:
        text = _encoded(prompt, MASK, tokenizer, lambda _: mask)
        text = [tokenizer.specials["cls"], *text, tokenizer.specials["sep"]]
        row = padded_row(text, tokenizer.pad, schema["tokens"].shape[0])
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
        text = _encoded(prompt, SENTINEL, tokenizer, lambda blank: int(sentinels[int(blank[1]) % len(sentinels)]))
        row = padded_row(text, tokenizer.pad, schema["encoder_tokens"].shape[0])
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


def _encoded(
    prompt: str, blank: re.Pattern[str], tokenizer: Any, token_of: Callable[[re.Match[str]], int]
) -> list[int]:
    """The tokens of a text with blanks, which tokenizers would encode as plain text."""
    tokens, start = list[int](), 0
    for match in blank.finditer(prompt):
        tokens += [*tokenizer.encode(prompt[start : match.start()]).tolist(), token_of(match)]
        start = match.end()
    return [*tokens, *tokenizer.encode(prompt[start:]).tolist()]


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


def sample_captions(run: TrainedRun, folder: Path) -> str | None:
    """Some captions, and the share of rows with every token correct; None without validation rows.

    This is the accuracy of greedy decoding: a row is correct if each token is the likeliest after the true prefix.
    """
    del folder
    valid, tokenizer = run.parts.splits.valid, run.parts.tokenizer
    if valid is None or not len(valid):
        return None
    rows = [valid[number] for number in range(min(CAPTION_ROWS, len(valid)))]
    correct, lines = 0, []
    for first in range(0, len(rows), CAPTION_BATCH):
        part = rows[first : first + CAPTION_BATCH]
        for row, predicted in zip(part, likeliest(run, part, tokenizer.vocabulary_size), strict=True):
            scored = np.asarray(row["loss_mask"]) > 0
            correct += bool((predicted == row["labels"])[scored].all())
            if len(lines) < PRINTED_CAPTIONS:
                predicted_text, true = (_caption(tokenizer, ids[scored]) for ids in (predicted, row["labels"]))
                lines.append(f"  {predicted_text}   (data: {true})")
    share = f"captions right: {correct} of {len(rows)} validation rows ({correct / len(rows):.1%})"
    return "\n".join(["captions of validation images:", *lines, share, ""])


def likeliest(run: TrainedRun, rows: list[Any], vocabulary: int) -> np.ndarray:
    """The likeliest next token at each position of these rows, int32 [rows, S]."""
    names = [name for name in ("tokens", "positions", "segment_ids", "images", "grids") if name in rows[0]]
    leaves = {name: np.stack([row[name] for row in rows]) for name in names}
    return np.asarray(run.model(**leaves))[..., :vocabulary].argmax(-1)


def _caption(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return visible(tokenizer.decode([int(token) for token in ids if token != tokenizer.eod])).strip()


def sample_confusion(run: TrainedRun, folder: Path) -> str | None:
    """The confusion matrix of the test rows, or else of the validation rows; None without either."""
    splits = run.parts.splits
    split, source = ("test", splits.test) if splits.test is not None else ("validation", splits.valid)
    if source is None:
        return None
    counts = confusion(run, source)
    names = class_names(source, len(counts))
    title = f"{split}: {np.trace(counts) / max(counts.sum(), 1):.2%} of {counts.sum():,} right"
    chart = Matrix(title=title, x_label="predicted", y_label="actual", names=names, counts=counts.tolist())
    try:
        inches = min(4 + 0.4 * len(names), 16)
        save_png(chart.plot, folder / PICTURE, inches=(inches, inches), dpi=110)
        picture = f"confusion of classes: {folder / PICTURE}"
    except ModuleNotFoundError as error:
        picture = f"{PICTURE} not drawn: {error}"
    errors = confusion_table(counts, names) if len(names) <= MAX_TABLE_CLASSES else confused_pairs(counts, names)
    return f"{title}\n{errors}\n{picture}"


def confusion(run: TrainedRun, source: Any) -> np.ndarray:
    """int64 [K, K]: number of images, or pixels, of class i that were classified as j."""
    counts, ignored = None, run.cfg.model.schema()["labels"].ignored
    for first in range(0, min(len(source), IMAGES), IMAGE_BATCH):
        rows = [source[row] for row in range(first, min(first + IMAGE_BATCH, len(source), IMAGES))]
        logits = np.asarray(run.model(images=np.stack([row["images"] for row in rows])))
        if counts is None:
            counts = np.zeros((logits.shape[-1],) * 2, np.int64)
        labels = np.stack([row["labels"] for row in rows])
        labelled = np.ones(labels.shape, bool) if ignored is None else labels != ignored
        np.add.at(counts, (labels[labelled], logits.argmax(-1)[labelled]), 1)
    return np.zeros((0, 0), np.int64) if counts is None else counts


def class_names(source: Any, count: int) -> list[str]:
    """Names of the classes if the data has them, else numbers."""
    class_list: Sequence[str] = getattr(getattr(source, "items", None), "classes", ())
    class_list = class_list if isinstance(class_list, Sequence) else ()
    return [*class_list[:count], *(str(number) for number in range(len(class_list[:count]), count))]


def confusion_table(counts: np.ndarray, names: Sequence[str]) -> str:
    """A line for each actual class, a column for each predicted one."""
    width = max(4, *(len(str(count)) for count in counts.flat))
    wide = max(map(len, names))
    lines = [" " * wide + "".join(f" {name[:width]:>{width}}" for name in names) + "  right"]
    for name, row, correct in zip(names, counts, counts.diagonal(), strict=True):
        cells = "".join(f" {count or '.':>{width}}" for count in row)
        lines.append(f"{name:>{wide}}{cells}  {correct / max(row.sum(), 1):.1%}")
    return "\n".join(lines)


def confused_pairs(counts: np.ndarray, names: Sequence[str]) -> str:
    """The pairs of classes that are confused most often."""
    errors = counts - np.diag(counts.diagonal())
    order = np.argsort(errors, axis=None, kind="stable")[::-1][:PAIRS]
    confused = [(*np.unravel_index(place, errors.shape), errors.flat[place]) for place in order if errors.flat[place]]
    return "\n".join(f"{names[true]} taken for {names[predicted]}: {count}" for true, predicted, count in confused)


SAMPLERS: Mapping[str, Callable[[TrainedRun, Path], str | None]] = {
    "blanks": sample_blanks,
    "captions": sample_captions,
    "confusion": sample_confusion,
    "continuation": sample_continuation,
    "spans": sample_spans,
}
"""The samplers of this file by name."""
