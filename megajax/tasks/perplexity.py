"""Perplexity of token files, of raw text, and of the splits of a run's own data."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.config.errors import UserError
from megajax.data.indexed import IndexedTokens
from megajax.data.reading import with_retries
from megajax.data.splits import Rows
from megajax.tasks.config import PerplexityConfig, SplitConfig, TextConfig, WikitextConfig
from megajax.tasks.detokenizers import detokenize
from megajax.tasks.files import read_lines, read_text
from megajax.tasks.loglikelihood import demand_ids
from megajax.tasks.statistics import exponential, ratio, scaled
from megajax.tokenizers.base import start_token
from megajax.training.scoring import Answer, Figure, Figures, Scorer, Window

LARGEST_EXPONENT = 20.0
"""Megatron-LM's perplexities of WIKITEXT103 are exp of at most this."""


def windows(tokens: np.ndarray, length: int, stride: int | None) -> Iterator[Window]:
    """Windows of up to length + 1 tokens in which every token of the stream but the first is counted once.

    The first window counts all its tokens. Each later one starts `stride` tokens after the one before and counts its
    last `stride` tokens, so that every counted token has at least length - stride tokens before it. These are the
    windows of Megatron-LM's zero-shot tasks, without those at the end that count nothing.

    tokens int [N]; stride None: `length`, windows that do not overlap. Raises UserError for a stride above the length.
    """
    stride = length if stride is None else stride
    if stride > length:
        raise UserError(f"stride={stride} is above the {length} tokens of a row: use {length} or less")
    targets = len(tokens) - 1
    if targets > 0:
        yield Window(tokens[: length + 1], min(length, targets))
    for first in range(length, targets, stride):
        end = min(first + stride, targets)
        yield Window(tokens[first + stride - length : end + 1], end - first)


def loss_figures(asked: Sequence[Window], answers: Sequence[Answer]) -> dict[str, Figure]:
    """`loss`, `perplexity` and `accuracy`, the share of counted tokens that are the likeliest ones."""
    counts = [window.counted for window in asked]
    loss = ratio([-answer.log_probability for answer in answers], counts)
    accuracy = ratio([answer.right for answer in answers], counts)
    return {"loss": loss, "perplexity": exponential(loss), "accuracy": accuracy}


class TokenFiles:
    """The figures of all tokens of some token files but the first, one file after another."""

    def __init__(self, config: PerplexityConfig, scorer: Scorer):
        """Raises UserError for files that cannot be read, or with ids that the model does not have."""
        self._scorer, self._windows = scorer, list[Window]()
        for path in config.paths:
            file = IndexedTokens(path)
            tokens = with_retries(file.read_all, path)
            if len(tokens) < 2:
                raise UserError(f"{path}: has {len(tokens)} tokens; perplexity needs two or more")
            if not np.issubdtype(tokens.dtype, np.integer):
                raise UserError(f"{path}: holds {tokens.dtype}, not ids of tokens")
            demand_ids(tokens, scorer, path)
            self._windows += windows(tokens.astype(np.int32), scorer.length, config.stride)

    def __call__(self) -> Figures:
        return loss_figures(self._windows, self._scorer.answers(self._windows))


class Text:
    """The figures of all tokens of some documents, and their loss for each word and byte.

    A word is what stands between white space, a byte one of UTF-8; both are counted in the documents as they are. This
    is lm-eval's loglikelihood_rolling, with windows that may overlap, and with one beginning-of-sequence token where
    lm-eval scores a second.
    """

    def __init__(self, config: TextConfig, scorer: Scorer):
        """Raises UserError for a file without text."""
        path, self._scorer = config.path, scorer
        if config.has_lines():
            documents = [line[config.key] for _, line in read_lines(path, {config.key: str})]
        else:
            documents = [read_text(path)]
        self._words = sum(len(document.split()) for document in documents)
        self._bytes = sum(len(document.encode("utf-8", errors="surrogatepass")) for document in documents)
        if not self._words:
            raise UserError(f"{path}: has no words")
        self._windows = list[Window]()
        for document in documents:
            tokens = np.concatenate([[start_token(scorer.tokenizer)], scorer.tokenizer.encode(document)])
            demand_ids(tokens, scorer, path)
            self._windows += windows(tokens, scorer.length, config.stride)

    def __call__(self) -> Figures:
        figures = loss_figures(self._windows, self._scorer.answers(self._windows))
        loss = figures["loss"]
        tokens = loss.count or 0
        byte = scaled(loss, tokens / self._bytes, self._bytes)
        return figures | {
            "word_perplexity": exponential(scaled(loss, tokens / self._words, self._words)),
            "byte_perplexity": exponential(byte),
            "bits_per_byte": scaled(byte, 1 / math.log(2)),
        }


class Wikitext:
    """Megatron-LM's WIKITEXT103: the loss of a detokenised text for each of its tokens and each original word.

    T tokens after tokenisation and W words, split at blanks, before: the ratio of tokens is (T - 1) / (W - 1), and the
    adjusted perplexity exp(loss x ratio). Both perplexities are cut off at exp(20).
    """

    def __init__(self, config: WikitextConfig, scorer: Scorer):
        """Raises UserError for a file without two words."""
        text, self._scorer = read_text(config.path), scorer
        self._words = len(text.strip().split(" "))
        tokens = scorer.tokenizer.encode(detokenize(text, config.detokenizer))
        if self._words < 2 or len(tokens) < 2:
            raise UserError(f"{config.path}: has {self._words} words and {len(tokens)} tokens, two of both are needed")
        demand_ids(tokens, scorer, config.path)
        self._ratio = (len(tokens) - 1) / (self._words - 1)
        self._windows = list(windows(tokens, scorer.length, config.stride))

    def __call__(self) -> Figures:
        figures = loss_figures(self._windows, self._scorer.answers(self._windows))
        loss = figures["loss"]
        word = scaled(loss, self._ratio, self._words - 1)
        return figures | {
            "perplexity": exponential(loss._replace(value=min(LARGEST_EXPONENT, loss.value))),
            "adjusted_perplexity": exponential(word._replace(value=min(LARGEST_EXPONENT, word.value))),
            "token_ratio": Figure(self._ratio),
        }


class Split:
    """The loss on all rows of a split of the run's own data, with the weights that the rows give their labels."""

    def __init__(self, config: SplitConfig, scorer: Scorer):
        """Raises UserError for data without this split."""
        cfg, self._scorer = scorer.program.cfg, scorer
        splits = cfg.data.build(
            tokenizer=scorer.tokenizer, schema=cfg.model.schema(), rows=Rows(0, None, None), seed=cfg.seed
        )
        self._rows = splits.valid if config.split == "validation" else splits.test
        if self._rows is None or not len(self._rows):
            raise UserError(f"the data has no {config.split} split: give it a share in data.split")

    def __call__(self) -> Figures:
        scorer, sums, right, counts = self._scorer, list[float](), list[float](), list[float]()
        at_once, total = scorer.rows_at_once(scorer.length), len(self._rows)
        for first in range(0, total, at_once):
            rows = [self._rows[number] for number in range(first, min(first + at_once, total))]
            for row, log_p, likeliest in zip(rows, *scorer.scores(rows), strict=True):
                weight = np.asarray(row["loss_mask"], np.float64)
                sums.append(-float(np.where(weight > 0, log_p[: len(weight)] * weight, 0).sum()))
                right.append(float(((likeliest[: len(weight)] == row["labels"]) * weight).sum()))
                counts.append(float(weight.sum()))
            scorer.progress(min(first + at_once, total), total)
        loss = ratio(sums, counts)
        return {"loss": loss, "perplexity": exponential(loss), "accuracy": ratio(right, counts)}
