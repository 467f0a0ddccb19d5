"""Perplexity of token files, raw text, and splits of a run's data."""

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.config.errors import UserError
from megajax.data.rows.splits import Rows
from megajax.data.text.indexed_dataset import IndexedTokens
from megajax.storage.local_copies import read_text
from megajax.storage.retried_reads import with_retries
from megajax.tasks.config import PerplexityConfig, SplitConfig, TextConfig, WikitextConfig
from megajax.tasks.loglikelihood import demand_ids
from megajax.tasks.read_jsonl import read_lines
from megajax.tasks.statistics import Figure, Figures, exponential, ratio, scaled
from megajax.tokenizers.base import start_token
from megajax.training.scorer import Scorer, Window, WindowScore

LARGEST_EXPONENT = 20.0
"""Megatron-LM limits the exponents of WIKITEXT103's perplexities to this."""

type Replacement = tuple[str | re.Pattern[str], str]

WIKITEXT: Sequence[Replacement] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"\{\s*([^}]*?)\s*\}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PENN_TREEBANK: Sequence[Replacement] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)
REPLACEMENTS = {"wikitext": WIKITEXT, "ptb": PENN_TREEBANK, "none": ()}
"""By the values of `WikitextConfig.detokenizer`: they remove the spaces of word-tokenised texts, like Megatron-LM's
tasks/zeroshot_gpt before scoring. The replacements and their order are Megatron-LM's, to get its figures; some never
match any text."""


def detokenize(text: str, kind: str) -> str:
    """The text after all replacements of this kind, in order."""
    for pattern, replacement in REPLACEMENTS[kind]:
        text = text.replace(pattern, replacement) if isinstance(pattern, str) else pattern.sub(replacement, text)
    return text


def windows(tokens: np.ndarray, length: int, stride: int | None) -> Iterator[Window]:
    """Windows of up to length + 1 tokens that count every token of the stream once, except the first.

    The first window counts all its tokens. Each later one starts `stride` tokens after the one before and counts its
    last `stride` tokens, so that every counted token has at least length - stride tokens before it. These are the
    windows of Megatron-LM's zero-shot tasks, without those at the end that count no tokens.

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


def loss_figures(windows: Sequence[Window], answers: Sequence[WindowScore]) -> dict[str, Figure]:
    """`loss`, `perplexity` and `accuracy`, the share of counted tokens that are the most likely ones."""
    counts = [window.counted for window in windows]
    loss = ratio([-answer.log_probability for answer in answers], counts)
    accuracy = ratio([answer.right for answer in answers], counts)
    return {"loss": loss, "perplexity": exponential(loss), "accuracy": accuracy}


class TokenFiles:
    """The figures over all tokens of token files, except the first token of each file."""

    def __init__(self, config: PerplexityConfig, scorer: Scorer):
        """Raises UserError for files that cannot be read, or with ids that the model does not have."""
        self._scorer, self._windows = scorer, list[Window]()
        for path in config.paths:
            file = IndexedTokens(path)
            tokens = with_retries(file.read_all, path)
            if len(tokens) < 2:
                raise UserError(f"{path}: has {len(tokens)} tokens; perplexity needs two or more")
            if not np.issubdtype(tokens.dtype, np.integer):
                raise UserError(f"{path}: holds {tokens.dtype}, not token ids")
            demand_ids(tokens, scorer, path)
            self._windows += windows(tokens.astype(np.int32), scorer.length, config.stride)

    def __call__(self) -> Figures:
        return loss_figures(self._windows, self._scorer.answers(self._windows))


class TextPerplexity:
    """The figures over all tokens of documents, and their loss per word and byte.

    Words are separated by white space, bytes are of UTF-8; both are counted in the original documents. This is
    lm-eval's loglikelihood_rolling, but windows may overlap, and no second beginning-of-sequence token is scored.
    """

    def __init__(self, config: TextConfig, scorer: Scorer):
        """Raises UserError for a file without text."""
        path, self._scorer = config.path, scorer
        if config.has_lines():
            documents = [line[config.key] for _, line in read_lines(path, {config.key: str})]
        else:
            documents = [read_text(path)]
        self._word_count = sum(len(document.split()) for document in documents)
        self._byte_count = sum(len(document.encode("utf-8", errors="surrogatepass")) for document in documents)
        if not self._word_count:
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
        byte = scaled(loss, tokens / self._byte_count, self._byte_count)
        return figures | {
            "word_perplexity": exponential(scaled(loss, tokens / self._word_count, self._word_count)),
            "byte_perplexity": exponential(byte),
            "bits_per_byte": scaled(byte, 1 / math.log(2)),
        }


class Wikitext:
    """Megatron-LM's WIKITEXT103: the loss of a detokenised text per token and per original word.

    With T tokens and W original words, separated by spaces, the token ratio is (T - 1) / (W - 1), and the adjusted
    perplexity exp(loss x ratio). Both perplexities are limited to exp(20).
    """

    def __init__(self, config: WikitextConfig, scorer: Scorer):
        """Raises UserError for a file without two words."""
        text, self._scorer = read_text(config.path), scorer
        self._word_count = len(text.strip().split(" "))
        tokens = scorer.tokenizer.encode(detokenize(text, config.detokenizer))
        if self._word_count < 2 or len(tokens) < 2:
            raise UserError(
                f"{config.path}: has {self._word_count} words and {len(tokens)} tokens, but needs two of both"
            )
        demand_ids(tokens, scorer, config.path)
        self._ratio = (len(tokens) - 1) / (self._word_count - 1)
        self._windows = list(windows(tokens, scorer.length, config.stride))

    def __call__(self) -> Figures:
        figures = loss_figures(self._windows, self._scorer.answers(self._windows))
        loss = figures["loss"]
        word = scaled(loss, self._ratio, self._word_count - 1)
        return figures | {
            "perplexity": exponential(loss._replace(value=min(LARGEST_EXPONENT, loss.value))),
            "adjusted_perplexity": exponential(word._replace(value=min(LARGEST_EXPONENT, word.value))),
            "token_ratio": Figure(self._ratio),
        }


class Split:
    """The loss on all rows of a split of the run's data, weighted by the rows' loss masks."""

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
        scorer, sums, correct, counts = self._scorer, list[float](), list[float](), list[float]()
        scorer.demand_all()
        batch_rows, total = scorer.rows_at_once(scorer.length), len(self._rows)
        for first in range(0, total, batch_rows):
            rows = [self._rows[number] for number in range(first, min(first + batch_rows, total))]
            for row, log_p, likeliest in zip(rows, *scorer.scores(rows), strict=True):
                weight = np.asarray(row["loss_mask"], np.float64)
                sums.append(-float(np.where(weight > 0, log_p[: len(weight)] * weight, 0).sum()))
                correct.append(float(((likeliest[: len(weight)] == row["labels"]) * weight).sum()))
                counts.append(float(weight.sum()))
            scorer.progress(min(first + batch_rows, total), total)
        loss = ratio(sums, counts)
        return {"loss": loss, "perplexity": exponential(loss), "accuracy": ratio(correct, counts)}
