"""SQuAD (Rajpurkar et al. 2016, 2018): answers from windows, and the official evaluation."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.data.language_benchmarks.config import SquadConfig
from megajax.data.language_benchmarks.squad import ParagraphWindow, SquadQuestion, read_split
from megajax.tasks.benchmarks import BenchmarkTask, as_lines
from megajax.tasks.config import SquadTaskConfig
from megajax.tasks.statistics import Figure, Figures, mean, scaled
from megajax.training.scorer import Scorer


class AnswerText(NamedTuple):
    """An answer to a question; the empty text means no answer."""

    text: str
    score: float
    """Sum of the scores of its first and last token."""


class Squad(BenchmarkTask[SquadConfig]):
    """Exact match and F1 in percent; in version 2.0 also on questions with and without an answer.

    The official evaluation reads predictions.json and, in version 2.0, null_odds.json.
    """

    def __init__(self, config: SquadTaskConfig, scorer: Scorer):
        """Raises UserError for a run on other data, and for a file in another format."""
        super().__init__(config, scorer, SquadConfig)
        self._config = config
        if config.threshold and self.data.version != "2.0":
            problem = f"threshold={config.threshold:g} is for version 2.0, but the run's data is of {self.data.version}"
            raise UserError(f"{config.name}: {problem}: leave it out")
        self._examples = self.examples(read_split)

    def __call__(self) -> Figures:
        scores, losses = self.scores_and_losses(self._examples)
        answers, odds, nbest = dict[str, str](), dict[str, float](), dict[str, list[dict]]()
        places = groupby(range(len(scores)), key=lambda place: self._examples.items[place].question.identifier)
        for identifier, group in places:
            rows = list(group)
            windows = [self._examples.items[place] for place in rows]
            best, none = best_answers(windows, scores[rows], self._config)
            odds[identifier] = none - (best[0].score if best else 0.0)
            unanswered = not best or (self.data.version == "2.0" and odds[identifier] > self._config.threshold)
            answers[identifier] = "" if unanswered else best[0].text
            nbest[identifier] = _with_probabilities(best + [AnswerText("", none)] * (self.data.version == "2.0"))
        self.write_predictions("predictions.json", as_lines(answers))
        self.write_predictions("nbest_predictions.json", as_lines(nbest))
        if self.data.version == "2.0":
            self.write_predictions("null_odds.json", as_lines(odds))
        questions = {window.question.identifier: window.question for window in self._examples.items}
        return evaluation(questions, answers, odds, self.data.version) | {"loss": mean(losses.tolist())}


def best_answers(
    windows: Sequence[ParagraphWindow], scores: np.ndarray, config: SquadTaskConfig
) -> tuple[list[AnswerText], float]:
    """The best answers to a question from its windows, without duplicate texts, and the score of no answer.

    scores: [windows, S, 2] of first and last tokens. A first token counts in the window with the most context. The
    score of no answer is the least sum of both heads at the first token of a row (Devlin et al. 2019, run_squad).
    """
    answers, paragraph = list[AnswerText](), windows[0].question.paragraph
    for number, (window, window_scores) in enumerate(zip(windows, scores, strict=True)):
        inside = window_scores[window.offset : window.offset + window.count].astype(np.float64)
        firsts, lasts = (np.argsort(-inside[:, head], kind="stable")[: config.best].tolist() for head in (0, 1))
        for first in firsts:
            if most_context(windows, window.first + first) != number:
                continue
            for last in lasts:
                if first <= last < first + config.longest_answer:
                    start, end = paragraph.spans[window.first + first][0], paragraph.spans[window.first + last][1]
                    score = float(inside[first, 0] + inside[last, 1])
                    answers.append(AnswerText(paragraph.text[start:end].strip(), score))
    answers.sort(key=lambda answer: -answer.score)
    unique = {answer.text: answer for answer in reversed(answers) if answer.text}
    best = sorted(unique.values(), key=lambda answer: -answer.score)[: config.best]
    return best, float(scores[:, 0].astype(np.float64).sum(-1).min())


def most_context(windows: Sequence[ParagraphWindow], token: int) -> int:
    """Index of the window with the most tokens on the shorter side of a paragraph's token; ties go to the first."""
    context_sizes = [
        min(token - window.first, window.first + window.count - 1 - token) + 0.01 * window.count
        if window.first <= token < window.first + window.count
        else -1.0
        for window in windows
    ]
    return int(np.argmax(context_sizes))


def _with_probabilities(answers: Sequence[AnswerText]) -> list[dict]:
    ordered = sorted(answers, key=lambda answer: -answer.score)
    values = np.exp(np.array([answer.score for answer in ordered]) - max((a.score for a in ordered), default=0.0))
    shares = values / max(values.sum(), 1e-30)
    return [
        {"text": answer.text, "probability": float(share), "score": answer.score}
        for answer, share in zip(ordered, shares, strict=True)
    ]


def evaluation(
    questions: Mapping[str, SquadQuestion], answers: Mapping[str, str], odds: Mapping[str, float], version: str
) -> dict[str, Figure]:
    """The figures of the official evaluation, in percent."""
    exact, overlap = dict[str, float](), dict[str, float]()
    for identifier, question in questions.items():
        references = right_answers(question, version)
        exact[identifier] = max(float(normalized(answers[identifier]) == normalized(text)) for text in references)
        overlap[identifier] = max(f1(answers[identifier], text, version) for text in references)
    figures = {"exact": _percent(exact.values()), "f1": _percent(overlap.values())}
    if version != "2.0":
        return figures
    for name, has_answer in (("has_answer", True), ("no_answer", False)):
        identifiers = [identifier for identifier, question in questions.items() if bool(question.answers) == has_answer]
        if identifiers:
            figures[f"{name}_exact"] = _percent(map(exact.__getitem__, identifiers))
            figures[f"{name}_f1"] = _percent(map(overlap.__getitem__, identifiers))
    for name, values in (("exact", exact), ("f1", overlap)):
        best, threshold = best_threshold(questions, answers, values, odds)
        figures |= {f"best_{name}": Figure(best), f"best_{name}_threshold": Figure(threshold)}
    return figures


def best_threshold(
    questions: Mapping[str, SquadQuestion],
    answers: Mapping[str, str],
    values: Mapping[str, float],
    odds: Mapping[str, float],
) -> tuple[float, float]:
    """The largest mean of the scores `values` in percent over thresholds of the odds of no answer, and the threshold.

    As in the official evaluation, from the final answers.
    """
    current = best = float(sum(not question.answers for question in questions.values()))
    threshold = 0.0
    for identifier in sorted(odds, key=odds.__getitem__):
        current += values[identifier] if questions[identifier].answers else -float(bool(answers[identifier]))
        if current > best:
            best, threshold = current, odds[identifier]
    return 100 * best / len(questions), threshold


def right_answers(question: SquadQuestion, version: str) -> list[str]:
    """Texts of the answers; in version 2.0 without those that have only articles and punctuation."""
    texts = [text for text, _ in question.answers]
    return texts if version != "2.0" else [text for text in texts if normalized(text)] or [""]


def normalized(text: str) -> str:
    """The text in lower case, without punctuation, articles and repeated spaces."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(answer: str, reference: str, version: str = "2.0") -> float:
    """F1 of the words that two answers share. In version 2.0, 1 if both have no words, and 0 if one has none."""
    answer_words, reference_words = normalized(answer).split(), normalized(reference).split()
    if version == "2.0" and not (answer_words and reference_words):
        return float(answer_words == reference_words)
    common = sum((Counter(answer_words) & Counter(reference_words)).values())
    return 2 * common / (len(answer_words) + len(reference_words)) if common else 0.0


def _percent(values: Iterable[float]) -> Figure:
    return scaled(mean(list(values)), 100.0)
