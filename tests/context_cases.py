"""Models with rows cut over `context`, to compare with one device that has whole rows.

`python -m benchmarks context_layouts` prints them as a table; tests/layouts/test_context_layouts.py holds each to its
tolerance.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from tiny_runs import ROWS, VOCABULARY, Differentiated, differentiate, gpt, llama

from megajax.batch import Batch
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.models.decoder.config import DecoderConfig

LONG = 64
"""Positions of a row: eight devices have eight each, in two chunks of four."""

FLOOR = 1e-3
"""Gradients below this share of the model's largest one are rounding: such are those of the biases of keys."""


def long_rows(seed: int = 0) -> Batch:
    """Leaves [ROWS, LONG, ...]: one to six documents a row, some of one token; a fifth of the labels masked."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, (ROWS, LONG + 1), dtype=np.int32)
    starts = [np.bincount(rng.integers(1, LONG, row % 6), minlength=LONG) > 0 for row in range(ROWS)]
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, np.arange(LONG), 0), axis=1)
    return {
        "tokens": text[:, :-1].copy(),
        "labels": text[:, 1:].copy(),
        "loss_mask": (rng.random((ROWS, LONG)) < np.linspace(0.6, 1, ROWS)[:, None]).astype(np.float32),
        "positions": (np.arange(LONG) - first).astype(np.int32),
        "segment_ids": segments,
        "sample": np.arange(40, 40 + ROWS, dtype=np.uint32),
    }


def long(model: DecoderConfig) -> DecoderConfig:
    """The model with rows of LONG positions."""
    return replace(model, sequence_length=LONG)


def windows(repeats: int = 1) -> DecoderConfig:
    """By turns a window with a learned sink and all earlier positions with a sink of 0."""
    (block,) = llama().stack.pattern
    windowed = replace(block, mixer=replace(block.mixer, window=9, sink="learned"))
    unwindowed = replace(block, mixer=replace(block.mixer, sink="zero"))
    return long(replace(llama(), stack=StackConfig(pattern=(windowed, unwindowed), repeats=repeats)))


def latent() -> DecoderConfig:
    """Multi-head latent attention: query and key heads of 12, value heads of 8, a key part shared by all heads."""
    (block,) = llama().stack.pattern
    mixer = LatentAttentionConfig(heads=8, query_rank=24, key_value_rank=16, content_dim=8, position_dim=4, value_dim=8)
    return long(replace(llama(), stack=StackConfig(pattern=(replace(block, mixer=mixer),), repeats=2)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained on every cut."""

    config: DecoderConfig
    isolated: bool = True
    """Whether the documents of a row do not see each other."""
    average: Literal["tokens", "microbatches"] = "tokens"


MODELS = {
    "GPT, dropout, whole rows": Model(config=long(gpt()), isolated=False, average="microbatches"),
    "GPT, dropout, documents": Model(config=long(gpt("selective"))),
    "Llama, documents": Model(config=long(llama("full")), average="microbatches"),
    "Llama, windows, sinks, documents": Model(config=windows()),
    "MLA, documents": Model(config=latent()),
}


def over_context(
    context: int, strategy: ContextStrategy, rounds: int = 1, heads: int = 2, **settings: object
) -> ParallelConfig:
    """Rows over so many devices."""
    return ParallelConfig(
        data=1, context=context, context_strategy=strategy, context_rounds=rounds, context_heads=heads, **settings
    )


def cuts(heads: int) -> list[ParallelConfig]:
    """Every strategy that this number of heads allows, over 2, 4 and 8 devices, and two rounds of zigzag."""
    strategies: tuple[ContextStrategy, ...] = ("all_gather", "ring", "all_to_all")
    groups = [
        over_context(4, "ring+all_to_all"),
        over_context(8, "ring+all_to_all", heads=2),
        over_context(8, "ring+all_to_all", heads=4),
    ]
    layouts = [over_context(size, strategy) for size in (2, 4, 8) for strategy in strategies] + groups
    layouts += [over_context(4, strategy, rounds=2) for strategy in (*strategies, "ring+all_to_all")]
    return [layout for layout in layouts if heads % layout.exchanging() == 0]


@dataclass(frozen=True)
class Case:
    """A model on a layout."""

    model: str
    parallel: ParallelConfig

    @property
    def sharding(self) -> str:
        """How rows are cut, in words."""
        p = self.parallel
        groups = f", groups of {p.context_heads}" if p.context_strategy == "ring+all_to_all" else ""
        rounds = f", {p.context_rounds} rounds" if p.context_rounds > 1 else ""
        return f"context {p.context}, {p.context_strategy}{groups}{rounds}"

    @property
    def name(self) -> str:
        return f"{self.model}: {self.sharding}"

    def difference(self) -> "Apart":
        """Of the first step from that of one device."""
        model = MODELS[self.model]
        settings = {"microbatches": 2, "average": model.average, "isolated": model.isolated, "draw": long_rows}
        expected, actual = (
            differentiate(model.config, on, **settings) for on in (ParallelConfig(data=1), self.parallel)
        )
        return apart(actual, expected)


@dataclass(frozen=True)
class Apart:
    """A step from one device's."""

    loss: float
    """Relative error of the loss."""
    gradient: float
    """Largest error of a gradient over the largest of its weight."""
    weight: str
    """Path of that weight."""
    padding: float = 0.0
    """The largest absolute gradient that belongs to no layer."""


def apart(actual: Differentiated, expected: Differentiated) -> Apart:
    """Between the same step on two layouts; a NaN is the largest error."""
    assert actual.gradients.keys() == expected.gradients.keys()
    floor = FLOOR * max(np.abs(g).max() for g in expected.gradients.values())
    errors = {
        path: float(np.abs(actual.gradients[path] - g).max() / max(np.abs(g).max(), floor))
        for path, g in expected.gradients.items()
    }
    worst = max(errors, key=lambda path: (np.isnan(errors[path]), errors[path]))
    return Apart(abs(actual.loss / expected.loss - 1), errors[worst], worst, actual.padding)


CASES = tuple(
    Case(name, parallel)
    for name, model in MODELS.items()
    for parallel in cuts(model.config.stack.pattern[0].mixer.heads)
)


def covering() -> list[Case]:
    """A few of the cases that have every model, and every strategy over any devices and in any rounds.

    tests/kernels/test_context_strategies.py has any two values of a strategy and of what a model passes to it.
    """

    def covered(case: Case) -> set[object]:
        p = case.parallel
        return {case.model, (p.context_strategy, p.context), (p.context_strategy, "rounds", p.context_rounds)}

    remaining, chosen = set().union(*map(covered, CASES)), []
    while remaining:
        chosen.append(max(CASES, key=lambda case: len(remaining & covered(case))))
        remaining -= covered(chosen[-1])
    return chosen
