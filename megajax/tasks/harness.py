"""Tasks of lm-evaluation-harness (Gao et al. 2021), run in this process on local data."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.config.optional_packages import require
from megajax.tasks.config import HarnessConfig
from megajax.tasks.loglikelihood import truncated_contexts
from megajax.tasks.statistics import Figure, Figures
from megajax.training.scorer import Scorer, Stopped

ENVIRONMENT = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE", "DISABLE_MULTIPROC"), "1"),
}
"""For lm-eval and its data libraries, which read it at import: no downloads, and no forks next to JAX's threads."""
RESAMPLES = 1000
"""Resamples for standard errors that lm-eval computes by bootstrapping."""


class Harness:
    """The metrics of the tasks as TASK/METRIC, with lm-eval's standard errors."""

    def __init__(self, config: HarnessConfig, scorer: Scorer):
        """Raises UserError for unknown tasks, and for tasks without local data."""
        self._config, self._scorer = config, scorer
        os.environ.update(ENVIRONMENT)
        self._library = require("lm_eval", "a task lm-eval:NAME")
        # lm-eval warns about every default that a task does not set.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if config.include_path is not None and not Path(config.include_path).is_dir():
            raise UserError(f"include_path={config.include_path}: not a folder")
        manager = self._manager()
        names = [name for name in config.tasks if name not in manager.all_tasks]
        if names:
            hint = did_you_mean(names[0], manager.all_tasks)
            places = f"lm-eval or {config.include_path}" if config.include_path else "lm-eval"
            raise UserError(f"lm-eval:{names[0]}: no task of {places} has this name" + f"; {hint}" * bool(hint))
        # Loaded here, so that a training run reports wrong data before its first step.
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
        """The task manager of the include path, with lm-eval's tasks if one of these is requested."""
        make = resolve("lm_eval.tasks:TaskManager")
        if self._config.include_path is not None:
            manager = make(include_path=self._config.include_path, include_defaults=False)
            if set(self._config.tasks) <= set(manager.all_tasks):
                return manager
        return make(include_path=self._config.include_path)

    def _load(self, manager: Any, name: str) -> Any:
        """A task or group with its data. Raises UserError if the data is missing."""
        try:
            loaded = manager.load([name])
        except Exception as error:  # of lm-eval, of datasets, of a task's own code
            first = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
            raise UserError(
                f"lm-eval:{name}: its data cannot be read on this machine, and nothing is downloaded "
                f"({type(error).__name__}: {first})\n"
                "Give --include-path with a task whose dataset_path is json or parquet and whose data_files are local."
            ) from error
        return next(iter(loaded["groups"].values()), None) or next(iter(loaded["tasks"].values()))


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The metrics of lm-eval's results. The name of a filter is appended to the metric's name."""
    for task, values in results["results"].items():
        metrics = [key for key in values if "," in key and not key.split(",")[0].endswith("_stderr")]
        for key in metrics:
            metric, _, filter_name = key.partition(",")
            if not isinstance(values[key], int | float):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            count = results.get("n-samples", {}).get(task, {}).get("effective")
            label = f"{task}/{metric}" + f"_{filter_name}" * (filter_name != "none")
            yield label, Figure(float(values[key]), error if isinstance(error, float) else None, count)
