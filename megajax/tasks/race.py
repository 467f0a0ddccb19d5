"""RACE (Lai et al. 2017): the accuracy on questions of both kinds of schools, and on all questions."""

from collections import defaultdict

from megajax.data.benchmarks.config import RaceConfig
from megajax.data.benchmarks.race import LETTERS, read_split
from megajax.tasks.benchmark import as_lines, demand_data, scores_and_losses, write_predictions
from megajax.tasks.config import RaceTaskConfig
from megajax.tasks.statistics import mean
from megajax.training.scoring import Figures, Scorer


class Race:
    """`accuracy`, and `accuracy_middle` and `accuracy_high` if the folder has both.

    race.json has the predicted letters by article file.
    """

    def __init__(self, config: RaceTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for files in another format."""
        self._config, self._scorer = config, scorer
        data, schema = demand_data(config, scorer, RaceConfig), scorer.program.cfg.model.schema()
        self._examples = read_split(data, config.split, scorer.tokenizer, schema)

    def __call__(self) -> Figures:
        scores, losses = scores_and_losses(self._scorer, self._examples)
        correct, letters = defaultdict[str, list[float]](list), defaultdict[str, list[str]](list)
        for question, choice in zip(self._examples.items, scores.argmax(-1).tolist(), strict=True):
            letters[question.identifier].append(LETTERS[choice])
            for name in {"accuracy", f"accuracy_{question.group}".rstrip("_")}:
                correct[name].append(choice == question.label)
        write_predictions(self._scorer, self._config, "race.json", as_lines(letters))
        return {name: mean(values) for name, values in sorted(correct.items())} | {"loss": mean(losses.tolist())}
