"""Work of the busiest device over the mean for rows of documents, sharded over context and balanced over data groups.

Run:  python benchmarks/context_balance.py [--rows=1024] [--model=llama3.py]

Documents have log-normal lengths. "As they come": they form one stream that is cut into rows, as in token files.
Packed: documents that fit into a row are packed, as conversations are. Prints tables, and writes
benchmarks/results/context_balance.json.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import outcome

from megajax.config import load
from megajax.data.rows.balancing import Imbalance, RowWork, balance_rows, device_scores, imbalance
from megajax.data.rows.packing import Packing, balanced_fit, best_fit
from megajax.mesh.sequence_sharding import SequenceSharding
from megajax.training.row_work import row_work

ROUNDS = (1, 4, 16)
GROUPS = 8
BALANCES = ("none", "microbatch", "step")
"""Of data.loader.balance."""


class Corpus(NamedTuple):
    """Rows of documents with log-normal lengths."""

    length: int
    """Tokens of a row."""
    median: int
    """Tokens of a document."""
    sigma: float
    """Of the logarithm of lengths."""


CORPORA = (
    *(Corpus(32768, 600, 1.3), Corpus(32768, 4000, 1.5)),
    *(Corpus(131072, 600, 1.3), Corpus(131072, 4000, 1.5), Corpus(131072, 30000, 1.0)),
)


@dataclass(frozen=True)
class Rows:
    """Lengths of the documents of each row, in the order in which rows are read."""

    documents: Sequence[np.ndarray]

    def shuffled(self, seed: int) -> "Rows":
        order = np.random.default_rng(seed).permutation(len(self.documents))
        return Rows([self.documents[row] for row in order.tolist()])


def draw_lengths(corpus: Corpus, rows: int, seed: int = 0) -> np.ndarray:
    """Lengths of documents that fill at least so many rows, int64."""
    draw, mean = np.random.default_rng(seed), corpus.median * np.exp(corpus.sigma**2 / 2)
    count = int(2 * rows * corpus.length / mean) + 1000
    lengths = np.maximum(1, draw.lognormal(np.log(corpus.median), corpus.sigma, count)).astype(np.int64)
    enough = int(np.searchsorted(np.cumsum(lengths), rows * corpus.length)) + 1
    return lengths[:enough]


def streamed(corpus: Corpus, rows: int) -> Rows:
    """A stream of documents cut into rows; a document that a cut divides is two."""
    document_ends, cuts = np.cumsum(draw_lengths(corpus, rows)), np.arange(rows + 1) * corpus.length
    borders = np.union1d(document_ends[document_ends < cuts[-1]], cuts)
    first = np.searchsorted(borders, cuts)
    return Rows([np.diff(borders[a : b + 1]) for a, b in pairwise(first.tolist())])


def packed(corpus: Corpus, rows: int, fit: Callable[[np.ndarray, int], list[list[int]]]) -> tuple[Rows, Packing]:
    """Documents no longer than a row, packed; padding is left out of the lengths, for it has next to no scores."""
    lengths = draw_lengths(corpus, rows)
    lengths = lengths[lengths <= corpus.length]
    packs = fit(lengths, corpus.length)
    return Rows([_filled(lengths[pack], corpus.length) for pack in packs]), Packing.of(lengths, packs, corpus.length)


def _filled(lengths: np.ndarray, length: int) -> np.ndarray:
    """With the padding behind them as documents of one position."""
    return np.concatenate([lengths, np.ones(length - int(lengths.sum()), np.int64)])


def over_context(rows: Rows, work: RowWork, context: int, rounds: int) -> tuple[float, float]:
    """(scores, FLOPs) of the busiest device of each row, summed over rows, over the mean device's."""
    sharding, ratios = SequenceSharding(context, rounds), []
    for measure in (
        lambda lengths: device_scores(lengths, sharding),
        lambda lengths: work.of_devices(lengths, sharding),
    ):
        loads = np.array([measure(lengths) for lengths in rows.documents])
        ratios.append(float(loads.max(1).sum() / loads.mean(1).sum()))
    return ratios[0], ratios[1]


def over_groups(
    rows: Rows, work: RowWork, sharding: SequenceSharding, microbatches: int, balance: str, groups: int = GROUPS
) -> Imbalance:
    """Mean over steps of a row of each group in each microbatch. balance: as data.loader.balance."""
    loads = np.array([work.of_row(lengths, sharding) for lengths in rows.documents])
    size, steps = groups * microbatches, list[Imbalance]()
    for first in range(0, len(loads) - size + 1, size):
        step = loads[first : first + size]
        if balance != "none":
            step = step[balance_rows(step, groups, microbatches, across=balance == "step")]
        steps.append(Imbalance.of(step, groups, microbatches))
    return Imbalance(*np.mean(steps, axis=0).tolist())


def busiest_row(rows: Rows, work: RowWork) -> float:
    """Of rows, the one with the most over the mean."""
    return imbalance(np.array([work.of_row(lengths) for lengths in rows.documents]))


def figures(corpus: Corpus, work: RowWork, rows: int, microbatches: int = 8) -> dict[str, Any]:
    """All ratios of a corpus: by kind of rows, over context, over groups."""
    kinds: dict[str, tuple[Rows, Packing | None]] = {"as they come": (streamed(corpus, rows), None)}
    for name, fit in (("best fit", best_fit), ("balanced", balanced_fit)):
        batches, packing = packed(corpus, rows, fit)
        kinds[name] = batches.shuffled(0), packing
    ratios: dict[str, Any] = {}
    for name, (batches, packing) in kinds.items():
        context = {
            f"{devices}/{rounds}": over_context(batches, work, devices, rounds)
            for devices in (8, 16)
            for rounds in (0, *ROUNDS)
        }
        parts = {"scores": RowWork(), "FLOPs": work}
        groups = {
            f"{unit}/{balance}": over_groups(batches, part, SequenceSharding(8, 4), microbatches, balance)
            for unit, part in parts.items()
            for balance in BALANCES
        }
        ratios[name] = {
            "rows": len(batches.documents),
            "fill": None if packing is None else packing.fill,
            "busiest row, scores": busiest_row(batches, RowWork()),
            "busiest row, FLOPs": busiest_row(batches, work),
            "context/rounds": context,
            "groups": groups,
        }
    return ratios


def tables(ratios: dict[str, dict[str, Any]]) -> str:
    """Markdown: work of the busiest over the mean, in scores and, in brackets, in FLOPs."""
    orders = [f"{devices}/{rounds}" for devices in (8, 16) for rounds in (0, *ROUNDS)]
    lines = ["Context: busiest device over mean; context size/rounds (0: plain chunks)", ""]
    lines += ["| rows | " + " | ".join(orders) + " |", "|" + "---|" * (1 + len(orders))]
    for corpus, kinds in ratios.items():
        for kind, values in kinds.items():
            cells = [f"{scores:.2f} [{flops:.2f}]" for scores, flops in (values["context/rounds"][o] for o in orders)]
            lines.append(f"| {corpus}, {kind} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{GROUPS} data groups, 8 microbatches of a row each: busiest over mean of a step; of microbatches",
        "",
    ]
    lines += ["| rows | fill | busiest row | in order | microbatch | step |", "|" + "---|" * 6]
    for corpus, kinds in ratios.items():
        for kind, values in kinds.items():
            row = f"{values['busiest row, scores']:.2f} [{values['busiest row, FLOPs']:.2f}]"
            cells = ["" if values["fill"] is None else f"{values['fill']:.1%}", row]
            for way in BALANCES:
                pairs = zip(*(values["groups"][f"{unit}/{way}"] for unit in ("scores", "FLOPs")), strict=True)
                cells.append("; ".join(f"{scores:.2f} [{flops:.2f}]" for scores, flops in pairs))
            lines.append(f"| {corpus}, {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def balance(rows: int, model: str) -> dict[str, dict[str, Any]]:
    """Figures of every corpus, by name. model: a config, whose layers are counted at each length."""
    ratios = {}
    for corpus in CORPORA:
        work = row_work(load(model, f"model.sequence_length={corpus.length}").model)
        name = f"{corpus.length // 1024}k, median {corpus.median}, sigma {corpus.sigma}"
        ratios[name] = figures(corpus, work, rows)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024, help="rows of each corpus")
    parser.add_argument("--model", default="llama3.py", help="config of the model whose FLOPs are counted")
    arguments = parser.parse_args()
    ratios = balance(arguments.rows, arguments.model)
    print(tables(ratios))
    outcome.write("context_balance", {"rows": arguments.rows, "model": arguments.model, "ratios": ratios})


if __name__ == "__main__":
    main()
