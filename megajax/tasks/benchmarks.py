"""Tasks on a run's benchmark data: GLUE (Wang et al. 2019), RACE (Lai et al. 2017), and what they share with SQuAD."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.config.errors import UserError
from megajax.data.benchmarks import glue, race
from megajax.data.benchmarks.config import GLUE, VALIDATION, BenchmarkConfig, GlueConfig, RaceConfig
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.tasks.config import BenchmarkTaskConfig, GlueTaskConfig, RaceTaskConfig
from megajax.tasks.statistics import f1, matthews, mean, pearson, spearman
from megajax.training.scoring import Figure, Figures, Scorer, demand_outputs

type Metric = Callable[[np.ndarray, np.ndarray], Figure]


def demand_data[C: BenchmarkConfig](config: BenchmarkTaskConfig, scorer: Scorer, kind: type[C]) -> C:
    """The data config of the run. Raises UserError for another benchmark's data, or a model without outputs."""
    demand_outputs(scorer.program, config.name)
    data = scorer.program.cfg.data
    if not isinstance(data, kind):
        raise UserError(f"{config.name} evaluates runs on {kind.__name__}, but this run's is {type(data).__name__}.")
    return data


def scores_and_losses(scorer: Scorer, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """The model's predictions for rows of the run's data: scores [rows, ...] and losses [rows]."""
    outputs = scorer.outputs(rows)
    return outputs["scores"], outputs["losses"]


def write_predictions(scorer: Scorer, config: BenchmarkTaskConfig, name: str, text: str) -> None:
    """Write a file of predictions on the first process, replacing an earlier evaluation's."""
    if scorer.folder is None or jax.process_index():
        return
    folder = RunFolder.create(scorer.folder / "predictions" / config.split).path
    write_atomically(folder / name, text)


def as_table(predictions: Sequence[Any]) -> str:
    """Predictions in the order of the examples, in the format of GLUE's server."""
    return "index\tprediction\n" + "".join(f"{number}\t{prediction}\n" for number, prediction in enumerate(predictions))


def as_lines(content: Any) -> str:
    """JSON with one entry per line."""
    return json.dumps(content, indent=0, ensure_ascii=False) + "\n"


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
        self._files = glue.read_split(self._data, config.split, scorer.tokenizer, schema)

    def __call__(self) -> Figures:
        figures: dict[str, Figure] = {}
        for suffix, examples in self._files.items():
            scores, losses = scores_and_losses(self._scorer, examples)
            values = scores.argmax(-1) if GLUE[self._data.task].classes else np.clip(scores, 0, glue.LARGEST_SCORE)
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


class Race:
    """`accuracy`, and `accuracy_middle` and `accuracy_high` if the folder has both.

    race.json has the predicted letters by article file.
    """

    def __init__(self, config: RaceTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for files in another format."""
        self._config, self._scorer = config, scorer
        data, schema = demand_data(config, scorer, RaceConfig), scorer.program.cfg.model.schema()
        self._examples = race.read_split(data, config.split, scorer.tokenizer, schema)

    def __call__(self) -> Figures:
        scores, losses = scores_and_losses(self._scorer, self._examples)
        correct, letters = defaultdict[str, list[float]](list), defaultdict[str, list[str]](list)
        for question, choice in zip(self._examples.items, scores.argmax(-1).tolist(), strict=True):
            letters[question.identifier].append(race.LETTERS[choice])
            for name in {"accuracy", f"accuracy_{question.group}".rstrip("_")}:
                correct[name].append(choice == question.label)
        write_predictions(self._scorer, self._config, "race.json", as_lines(letters))
        return {name: mean(values) for name, values in sorted(correct.items())} | {"loss": mean(losses.tolist())}
