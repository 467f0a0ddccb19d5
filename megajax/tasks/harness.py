"""Tasks of lm-evaluation-harness (Gao et al. 2021) in this process, on data of this machine."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.config.nearest import did_you_mean
from megajax.tasks.config import HarnessConfig
from megajax.tasks.loglikelihood import truncated_contexts
from megajax.training.scoring import Figure, Figures, Scorer, Stopped

ENVIRONMENT = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE", "DISABLE_MULTIPROC"), "1"),
}
"""For lm-eval and the libraries that it reads data with: nothing is fetched, and nothing forks beside JAX's threads.
Read when they are imported."""
RESAMPLES = 1000
"""For standard errors that lm-eval finds by bootstrapping."""


class Harness:
    """The metrics of the tasks as TASK/METRIC, with the standard errors that lm-eval gives."""

    def __init__(self, config: HarnessConfig, scorer: Scorer):
        """Raises UserError for unknown tasks, and for those whose data is not on this machine."""
        self._config, self._scorer = config, scorer
        os.environ.update(ENVIRONMENT)
        self._library = require("lm_eval", "a task lm-eval:NAME")
        # It warns of every default that a task leaves to it.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if config.include_path is not None and not Path(config.include_path).is_dir():
            raise UserError(f"include_path={config.include_path}: there is no such folder")
        manager = self._manager()
        names = [name for name in config.tasks if name not in manager.all_tasks]
        if names:
            near = did_you_mean(names[0], manager.all_tasks)
            where = f"lm-eval or {config.include_path}" if config.include_path else "lm-eval"
            raise UserError(f"lm-eval:{names[0]}: no task of {where} has this name" + f"; {near}" * bool(near))
        # Loaded once: in a training run, what is wrong with the data shows before the first step.
        self._tasks = [self._load(manager, name) for name in config.tasks]

    def __call__(self) -> Figures:
        model = resolve("megajax.tasks.harness_model:HarnessModel")(self._scorer, self._config.generated)
        try:
            results = self._library.simple_evaluate(
                model=model,
                tasks=self._tasks,
                num_fewshot=self._config.fewshot,
                limit=self._config.limit,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
        except (Stopped, UserError):
            raise
        except (ValueError, KeyError, TypeError) as error:
            names = ", ".join(self._config.tasks)
            raise UserError(f"lm-eval:{names}: the task failed: {type(error).__name__}: {error}") from error
        figures = dict(_figures(results))
        return figures | truncated_contexts(model.truncated)

    def _manager(self) -> Any:
        """The task manager of the include path; with lm-eval's own tasks too where one of these is asked for."""
        make = resolve("lm_eval.tasks:TaskManager")
        if self._config.include_path is not None:
            own = make(include_path=self._config.include_path, include_defaults=False)
            if set(self._config.tasks) <= set(own.all_tasks):
                return own
        return make(include_path=self._config.include_path)

    def _load(self, manager: Any, name: str) -> Any:
        """A task or group with its data. Raises UserError where the data is not there."""
        try:
            loaded = manager.load([name])
        except Exception as error:  # of lm-eval, of datasets, of a task's own code
            first = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
            raise UserError(
                f"lm-eval:{name}: its data cannot be read on this machine, and nothing is fetched "
                f"({type(error).__name__}: {first})\n"
                "Give --include-path with a task whose dataset_path is json or parquet and whose data_files are local."
            ) from error
        return next(iter(loaded["groups"].values()), None) or next(iter(loaded["tasks"].values()))


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The metrics of lm-eval's results; of several filters, the filter behind the metric's name."""
    for task, values in results["results"].items():
        metrics = [key for key in values if "," in key and not key.split(",")[0].endswith("_stderr")]
        for key in metrics:
            metric, _, chosen = key.partition(",")
            if not isinstance(values[key], int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            count = results.get("n-samples", {}).get(task, {}).get("effective")
            label = f"{task}/{metric}" + f"_{chosen}" * (chosen != "none")
            yield label, Figure(float(values[key]), error if isinstance(error, float) else None, count)
