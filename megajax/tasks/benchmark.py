"""Shared parts of benchmark tasks: a check of the data, and files of predictions."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megajax.config.errors import UserError
from megajax.data.benchmarks.config import BenchmarkConfig
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.tasks.config import BenchmarkTaskConfig
from megajax.training.scoring import Scorer, demand_outputs


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
