"""GLUE (Wang et al. 2019): the metrics of each task, and predictions in the format of its server."""

from collections.abc import Callable, Mapping

import numpy as np

from megajax.data.benchmarks.config import GLUE, VALIDATION, GlueConfig
from megajax.data.benchmarks.glue import LARGEST_SCORE, read_split
from megajax.tasks.benchmark import as_table, demand_data, scores_and_losses, write_predictions
from megajax.tasks.config import GlueTaskConfig
from megajax.tasks.metrics import f1, matthews, pearson, spearman
from megajax.tasks.statistics import mean
from megajax.training.scoring import Figure, Figures, Scorer

type Metric = Callable[[np.ndarray, np.ndarray], Figure]


def accuracy(values: np.ndarray, labels: np.ndarray) -> Figure:
    """Share of the examples with the correct class."""
    return mean((values == labels).tolist())


def plain(metric: Callable[[np.ndarray, np.ndarray], float]) -> Metric:
    """A metric without a standard error."""
    return lambda values, labels: Figure(metric(values, labels), None, len(labels))


ACCURACY = {"accuracy": accuracy}
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "cola": {"matthews": plain(matthews)},
    "mrpc": {"f1": plain(f1), **ACCURACY},
    "qqp": {"f1": plain(f1), **ACCURACY},
    "stsb": {"pearson": plain(pearson), "spearman": plain(spearman)},
}
"""Tasks with other metrics than only accuracy."""
FILES = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP", "mnli": "MNLI-m",
    "mnli_mismatched": "MNLI-mm", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI",
}  # fmt: skip
"""Names of the files of predictions."""


class Glue:
    """Metrics of the files of a split; only predictions for `test`, whose labels are not public."""

    def __init__(self, config: GlueTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for files in another format."""
        self._config, self._scorer = config, scorer
        self._data = demand_data(config, scorer, GlueConfig)
        schema = scorer.program.cfg.model.schema()
        self._files = read_split(self._data, config.split, scorer.tokenizer, schema)

    def __call__(self) -> Figures:
        figures: dict[str, Figure] = {}
        for suffix, examples in self._files.items():
            scores, losses = scores_and_losses(self._scorer, examples)
            values = scores.argmax(-1) if GLUE[self._data.task].classes else np.clip(scores, 0, LARGEST_SCORE)
            self._write(suffix, values)
            if self._config.split == VALIDATION:
                labels = np.array([item.label for item in examples.items])
                metrics = METRICS.get(self._data.task, ACCURACY)
                figures |= {f"{name}{suffix}": metric(values, labels) for name, metric in metrics.items()}
                figures[f"loss{suffix}"] = mean(losses.tolist())
            else:
                figures[f"predictions{suffix}"] = Figure(len(values))
        return figures

    def _write(self, suffix: str, values: np.ndarray) -> None:
        classes, name = GLUE[self._data.task].classes, FILES[f"{self._data.task}{suffix}"]
        texts = [classes[value] for value in values] if classes else [f"{value:.3f}" for value in values]
        write_predictions(self._scorer, self._config, f"{name}.tsv", as_table(texts))
