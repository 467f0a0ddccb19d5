"""What the tasks of benchmarks share: the data they need, and the files of predictions."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megajax.config.errors import UserError
from megajax.data.config.benchmarks import BenchmarkConfig
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.tasks.config import BenchmarkTaskConfig
from megajax.training.scoring import Scorer, demand_outputs


def demand_data[C: BenchmarkConfig](config: BenchmarkTaskConfig, scorer: Scorer, kind: type[C]) -> C:
    """The data config of the run. Raises UserError for one of another benchmark, or a model without outputs."""
    demand_outputs(scorer.program, config.name)
    data = scorer.program.cfg.data
    if not isinstance(data, kind):
        raise UserError(f"{config.name} evaluates a run on {kind.__name__}; this run's data is {type(data).__name__}.")
    return data


def scores_and_losses(scorer: Scorer, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the model predicts for rows of the run's data: scores [rows, ...] and losses [rows]."""
    outputs = scorer.outputs(rows)
    return outputs["scores"], outputs["losses"]


def write_predictions(scorer: Scorer, config: BenchmarkTaskConfig, name: str, text: str) -> None:
    """Write a file of predictions, in place of that of an earlier evaluation; the first process alone does."""
    if scorer.folder is None or jax.process_index():
        return
    folder = RunFolder.create(scorer.folder / "predictions" / config.split).path
    write_atomically(folder / name, text)


def as_table(predictions: Sequence[Any]) -> str:
    """Predictions in the order of the examples, as the server of GLUE takes them."""
    return "index\tprediction\n" + "".join(f"{number}\t{each}\n" for number, each in enumerate(predictions))


def as_lines(content: Any) -> str:
    """JSON with an entry in each line."""
    return json.dumps(content, indent=0, ensure_ascii=False) + "\n"
