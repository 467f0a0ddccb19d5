"""Work of rows of documents, sharded over context and balanced over data groups."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megajax.config import load
from megajax.data.rows.balancing import Imbalance, RowWork, balance_rows, device_scores, imbalance
from megajax.data.rows.packing import Packing, balanced_fit, best_fit
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.summary import summarize
from megajax.training.row_work import row_work

ROUNDS = (1, 4, 16)
GROUPS, MICROBATCHES = 8, 8
BALANCES = ("none", "microbatch", "step")
"""Values of data.loader.balance."""

type Rows = Sequence[np.ndarray]
"""Lengths of the documents of each row, in the order in which rows are read."""


class Corpus(NamedTuple):
    """Documents with log-normal lengths."""

    length: int
    """Tokens of a row."""
    median: int
    """Tokens of a document."""
    sigma: float
    """Of the logarithm of the length."""


CORPORA = (
    *(Corpus(32768, 600, 1.3), Corpus(32768, 4000, 1.5)),
    *(Corpus(131072, 600, 1.3), Corpus(131072, 4000, 1.5), Corpus(131072, 30000, 1.0)),
)


def context_balance(*, rows: int = 1024, model: str = "llama3.py") -> dict[str, Any]:
    """Work of the busiest device over the mean for rows of documents, sharded over context, balanced over data groups.

    Documents have log-normal lengths. "As they come": they form one stream that is cut into rows, as in token files.
    Packed: documents that fit into a row are packed, as conversations are. --rows: of each corpus. --model: the config
    whose FLOPs are counted at each length.
    """
    ratios = {}
    for corpus in CORPORA:
        work = row_work(summarize(load(model, f"model.sequence_length={corpus.length}").model))
        name = f"{corpus.length // 1024}k, median {corpus.median}, sigma {corpus.sigma}"
        ratios[name] = figures(corpus, work, rows)
    print(tables(ratios))
    return {"rows": rows, "model": model, "ratios": ratios}


def draw_lengths(corpus: Corpus, rows: int, seed: int = 0) -> np.ndarray:
    """Lengths of documents that fill at least so many rows, int64."""
    draw, mean = np.random.default_rng(seed), corpus.median * np.exp(corpus.sigma**2 / 2)
    count = int(2 * rows * corpus.length / mean) + 1000
    lengths = np.maximum(1, draw.lognormal(np.log(corpus.median), corpus.sigma, count)).astype(np.int64)
    enough = int(np.searchsorted(np.cumsum(lengths), rows * corpus.length)) + 1
    return lengths[:enough]


def streamed(corpus: Corpus, rows: int) -> Rows:
    """A stream of documents cut into rows; a document across a cut becomes two."""
    document_ends, cuts = np.cumsum(draw_lengths(corpus, rows)), np.arange(rows + 1) * corpus.length
    borders = np.union1d(document_ends[document_ends < cuts[-1]], cuts)
    first = np.searchsorted(borders, cuts)
    return [np.diff(borders[a : b + 1]) for a, b in pairwise(first.tolist())]


def packed(corpus: Corpus, rows: int, fit: Callable[[np.ndarray, int], list[list[int]]]) -> tuple[Rows, Packing]:
    """Documents no longer than a row, packed and shuffled. Each position of padding counts as a document."""
    lengths = draw_lengths(corpus, rows)
    lengths = lengths[lengths <= corpus.length]
    packs = fit(lengths, corpus.length)
    filled = [
        np.concatenate([lengths[pack], np.ones(corpus.length - int(lengths[pack].sum()), np.int64)]) for pack in packs
    ]
    order = np.random.default_rng(0).permutation(len(filled))
    return [filled[row] for row in order.tolist()], Packing.of(lengths, packs, corpus.length)


def over_context(rows: Rows, work: RowWork, context: int, rounds: int) -> tuple[float, float]:
    """(scores, FLOPs) of the busiest device over the mean device, each summed over rows."""
    sharding = SequenceSharding(context, rounds)
    scores = np.array([device_scores(lengths, sharding) for lengths in rows])
    flops = np.array([work.of_devices(lengths, sharding) for lengths in rows])
    over_scores, over_flops = (float(loads.max(1).sum() / loads.mean(1).sum()) for loads in (scores, flops))
    return over_scores, over_flops


def over_groups(rows: Rows, work: RowWork, sharding: SequenceSharding, balance: str) -> Imbalance:
    """The mean over steps with one row per group and microbatch. balance: a value of data.loader.balance."""
    loads = np.array([work.of_row(lengths, sharding) for lengths in rows])
    size, steps = GROUPS * MICROBATCHES, list[Imbalance]()
    for first in range(0, len(loads) - size + 1, size):
        step = loads[first : first + size]
        if balance != "none":
            step = step[balance_rows(step, GROUPS, MICROBATCHES, across=balance == "step")]
        steps.append(Imbalance.of(step, GROUPS, MICROBATCHES))
    return Imbalance(*np.mean(steps, axis=0).tolist())


def figures(corpus: Corpus, work: RowWork, rows: int) -> dict[str, Any]:
    """All ratios of a corpus: by kind of rows, over context, over groups."""
    kinds: dict[str, tuple[Rows, Packing | None]] = {"as they come": (streamed(corpus, rows), None)}
    kinds |= {"best fit": packed(corpus, rows, best_fit), "balanced": packed(corpus, rows, balanced_fit)}
    parts, ratios = {"scores": RowWork(), "FLOPs": work}, dict[str, Any]()
    for name, (documents, packing) in kinds.items():
        busiest = {
            f"busiest row, {unit}": imbalance(np.array([part.of_row(lengths) for lengths in documents]))
            for unit, part in parts.items()
        }
        context = {
            f"{devices}/{rounds}": over_context(documents, work, devices, rounds)
            for devices in (8, 16)
            for rounds in (0, *ROUNDS)
        }
        groups = {
            f"{unit}/{balance}": over_groups(documents, part, SequenceSharding(8, 4), balance)
            for unit, part in parts.items()
            for balance in BALANCES
        }
        fill = None if packing is None else packing.fill
        ratios[name] = {"rows": len(documents), "fill": fill} | busiest | {"context/rounds": context, "groups": groups}
    return ratios


def tables(ratios: dict[str, dict[str, Any]]) -> str:
    """Markdown: work of the busiest over the mean, in scores and, in brackets, in FLOPs."""
    orders = [f"{devices}/{rounds}" for devices in (8, 16) for rounds in (0, *ROUNDS)]
    rows = [(f"{corpus}, {kind}", values) for corpus, kinds in ratios.items() for kind, values in kinds.items()]
    lines = ["Context: busiest device over mean; context size/rounds (0: plain chunks)", ""]
    lines += ["| rows | " + " | ".join(orders) + " |", "|" + "---|" * (1 + len(orders))]
    for name, values in rows:
        cells = [f"{scores:.2f} [{flops:.2f}]" for scores, flops in (values["context/rounds"][o] for o in orders)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    title = (
        f"{GROUPS} data groups, {MICROBATCHES} microbatches of a row each: busiest over mean of a step; of microbatches"
    )
    lines += ["", title, "", "| rows | fill | busiest row | in order | microbatch | step |", "|" + "---|" * 6]
    for name, values in rows:
        row = f"{values['busiest row, scores']:.2f} [{values['busiest row, FLOPs']:.2f}]"
        cells = ["" if values["fill"] is None else f"{values['fill']:.1%}", row]
        for way in BALANCES:
            pairs = zip(*(values["groups"][f"{unit}/{way}"] for unit in ("scores", "FLOPs")), strict=True)
            cells.append("; ".join(f"{scores:.2f} [{flops:.2f}]" for scores, flops in pairs))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
