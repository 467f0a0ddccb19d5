"""Tasks on a run's benchmark data: GLUE (Wang et al. 2019), RACE (Lai et al. 2017), and what they share with SQuAD."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.batch import Rows
from megajax.config.errors import UserError
from megajax.data.language_benchmarks import glue, race
from megajax.data.language_benchmarks.config import GLUE, VALIDATION, BenchmarkConfig, GlueConfig, RaceConfig
from megajax.metrics.run_folder import RunFolder, write_atomically
from megajax.tasks.config import BenchmarkTaskConfig, GlueTaskConfig, RaceTaskConfig
from megajax.tasks.statistics import Figure, Figures, f1, matthews, mean, pearson, spearman
from megajax.training.program import Program
from megajax.training.scorer import Scorer

type Metric = Callable[[np.ndarray, np.ndarray], Figure]


def demand_outputs(program: Program, task: str) -> None:
    """Raises UserError, which names the task, for a model without outputs of whole rows."""
    if not hasattr(program.abstract, "outputs"):
        model = type(program.cfg.model).__name__
        raise UserError(f"{task} needs a model with outputs of whole rows, for example classes; {model} has none")


class BenchmarkTask[C: BenchmarkConfig]:
    """A task on a split of a run's benchmark data."""

    def __init__(self, config: BenchmarkTaskConfig, scorer: Scorer, kind: type[C]):
        """kind: of the run's data. Raises UserError for another benchmark's data, or a model without outputs."""
        demand_outputs(scorer.program, config.name)
        data = scorer.program.cfg.data
        if not isinstance(data, kind):
            problem = f"{config.name} evaluates runs on {kind.__name__}, but this run's is {type(data).__name__}"
            raise UserError(f"{problem}.")
        self.scorer, self.split, self.data = scorer, config.split, data

    def examples(self, read_split: Callable[..., Any]) -> Any:
        """The examples of the split. Raises UserError for files in another format."""
        return read_split(self.data, self.split, self.scorer.tokenizer, self.scorer.program.cfg.model.schema())

    def scores_and_losses(self, examples: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray]:
        """The model's predictions: scores [examples, ...] and losses [examples]."""
        outputs = self.scorer.outputs(examples)
        return outputs["scores"], outputs["losses"]

    def write_predictions(self, name: str, text: str) -> None:
        """Write a file of predictions on the first process, replacing an earlier evaluation's."""
        if self.scorer.folder is None or jax.process_index():
            return
        write_atomically(RunFolder.create(self.scorer.folder / "predictions" / self.split).path / name, text)


def as_table(predictions: Sequence[Any]) -> str:
    """Predictions in the order of the examples, in the format of GLUE's server."""
    return "index\tprediction\n" + "".join(f"{number}\t{prediction}\n" for number, prediction in enumerate(predictions))


def as_lines(content: object) -> str:
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


class Glue(BenchmarkTask[GlueConfig]):
    """Metrics of the files of a split; only predictions for `test`, whose labels are not public."""

    def __init__(self, config: GlueTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for files in another format."""
        super().__init__(config, scorer, GlueConfig)
        self._files = self.examples(glue.read_split)

    def __call__(self) -> Figures:
        figures: dict[str, Figure] = {}
        for suffix, examples in self._files.items():
            scores, losses = self.scores_and_losses(examples)
            values = scores.argmax(-1) if GLUE[self.data.task].classes else np.clip(scores, 0, glue.LARGEST_SCORE)
            self._write(suffix, values)
            if self.split == VALIDATION:
                labels = np.array([item.label for item in examples.items])
                metrics = METRICS.get(self.data.task, ACCURACY)
                figures |= {f"{name}{suffix}": metric(values, labels) for name, metric in metrics.items()}
                figures[f"loss{suffix}"] = mean(losses.tolist())
            else:
                figures[f"predictions{suffix}"] = Figure(len(values))
        return figures

    def _write(self, suffix: str, values: np.ndarray) -> None:
        classes, name = GLUE[self.data.task].classes, FILES[f"{self.data.task}{suffix}"]
        texts = [classes[value] for value in values] if classes else [f"{value:.3f}" for value in values]
        self.write_predictions(f"{name}.tsv", as_table(texts))


class Race(BenchmarkTask[RaceConfig]):
    """`accuracy`, and `accuracy_middle` and `accuracy_high` if the folder has both.

    race.json has the predicted letters by article file.
    """

    def __init__(self, config: RaceTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for files in another format."""
        super().__init__(config, scorer, RaceConfig)
        self._examples = self.examples(race.read_split)

    def __call__(self) -> Figures:
        scores, losses = self.scores_and_losses(self._examples)
        correct, letters = defaultdict[str, list[float]](list), defaultdict[str, list[str]](list)
        for question, choice in zip(self._examples.items, scores.argmax(-1).tolist(), strict=True):
            letters[question.identifier].append(race.LETTERS[choice])
            for name in {"accuracy", f"accuracy_{question.group}".rstrip("_")}:
                correct[name].append(choice == question.label)
        self.write_predictions("race.json", as_lines(letters))
        return {name: mean(values) for name, values in sorted(correct.items())} | {"loss": mean(losses.tolist())}
