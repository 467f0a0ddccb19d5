"""Metrics of GLUE and SQuAD against scikit-learn, scipy and hand-computed cases."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics
from user_errors import user_error

from megajax.data.language_benchmarks.config import SquadConfig
from megajax.data.language_benchmarks.squad import Paragraph, ParagraphWindow, SquadQuestion, paragraph_windows
from megajax.tasks.config import SquadTaskConfig
from megajax.tasks.squad import Squad, best_answers, evaluation, most_context, normalized
from megajax.tasks.squad import f1 as word_f1
from megajax.tasks.statistics import f1, matthews, pearson, spearman


def test_a_threshold_needs_version_2(monkeypatch):
    monkeypatch.setattr("megajax.tasks.benchmarks.demand_outputs", lambda program, name: None)
    scorer: Any = SimpleNamespace(
        program=SimpleNamespace(cfg=SimpleNamespace(data=SquadConfig(path="", version="1.1")))
    )
    with user_error("squad"):
        Squad(SquadTaskConfig(threshold=1.0), scorer)


def test_class_metrics_match_scikit_learn():
    rng = np.random.default_rng(0)
    for share in (0.0, 0.2, 0.5, 1.0):
        predicted, labels = rng.random(50) < share, rng.random(50) < 0.4
        predicted, labels = predicted.astype(int), labels.astype(int)
        np.testing.assert_allclose(f1(predicted, labels), sklearn_metrics.f1_score(labels, predicted, zero_division=0))
        np.testing.assert_allclose(
            matthews(predicted, labels), sklearn_metrics.matthews_corrcoef(labels, predicted), atol=1e-12
        )
    assert f1(np.zeros(3), np.zeros(3)) == matthews(np.zeros(3), np.zeros(3)) == 0


def test_correlations_with_ties_match_scipy():
    rng = np.random.default_rng(0)
    predicted, labels = rng.normal(size=40).round(1), rng.integers(0, 6, 40).astype(float)
    np.testing.assert_allclose(pearson(predicted, labels), stats.pearsonr(predicted, labels).statistic)
    np.testing.assert_allclose(spearman(predicted, labels), stats.spearmanr(predicted, labels).statistic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(pearson(np.ones(3), np.arange(3.0)))


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert normalized(" The  Cat, (a dog)! ") == "cat dog"
    assert normalized("anthem of the U.S.") == "anthem of us"
    assert word_f1("the blue cat", "cat sat") == pytest.approx(2 * 0.5 * 0.5)
    assert word_f1("a cat cat", "cat") == pytest.approx(2 / 3)
    assert (word_f1("", ""), word_f1("", "", "1.1"), word_f1("", "cat"), word_f1("the", "")) == (1, 0, 0, 1)


def asked(identifier: str, *answers: str) -> SquadQuestion:
    paragraph = Paragraph("", np.zeros(0, np.int32), np.zeros((0, 2), np.int64))
    return SquadQuestion("", identifier, np.zeros(1, np.int32), paragraph, tuple((answer, 0) for answer in answers))


def test_evaluation_of_version_2_by_hand():
    questions = {q.identifier: q for q in (asked("a", "blue cat", "cat"), asked("b", "dog"), asked("c"), asked("d"))}
    answers, odds = {"a": "The cat", "b": "red dog", "c": "", "d": "tree"}, {"a": -3.0, "b": -1.0, "c": 5.0, "d": -2.0}
    figures = {name: figure.value for name, figure in evaluation(questions, answers, odds, "2.0").items()}
    assert figures["exact"] == 50 and figures["f1"] == pytest.approx((1 + 2 / 3 + 1 + 0) * 25)
    assert (figures["has_answer_exact"], figures["no_answer_exact"]) == (50, 50)
    assert figures["has_answer_f1"] == pytest.approx(50 * (1 + 2 / 3)) and figures["no_answer_f1"] == 50
    # The two without an answer are correct at first; then a, d, b get answers in this order, and c stays empty.
    assert (figures["best_exact"], figures["best_exact_threshold"]) == (75, -3)
    assert (figures["best_f1"], figures["best_f1_threshold"]) == (75, -3)


def test_evaluation_of_version_1_takes_the_best_of_the_answers():
    questions = {q.identifier: q for q in (asked("a", "the", "cat"), asked("b", "a red dog"))}
    figures = evaluation(questions, {"a": "", "b": "red dog house"}, {}, "1.1")
    assert figures.keys() == {"exact", "f1"} and figures["exact"].value == 50
    assert figures["f1"].value == pytest.approx(100 * (0 + 2 * 2 / 5) / 2)


def paragraph_of(word_count: int) -> SquadQuestion:
    text = " ".join(f"w{number}" for number in range(word_count))
    starts = [text.index(f"w{number}") for number in range(word_count)]
    spans = np.array([(start, start + len(f"w{number}")) for number, start in enumerate(starts)])
    return SquadQuestion("", "q", np.zeros(2, np.int32), Paragraph(text, np.zeros(word_count, np.int32), spans), ())


def test_a_token_counts_in_the_window_with_most_context():
    windows = list(paragraph_windows(paragraph_of(9), 5, 2))
    assert [(window.first, window.count) for window in windows] == [(0, 5), (2, 5), (4, 5)]
    assert [most_context(windows, token) for token in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_the_best_spans_match_an_exhaustive_search():
    windows = list(paragraph_windows(paragraph_of(9), 5, 2))
    scores = np.random.default_rng(0).normal(size=(3, 12, 2)).astype(np.float32)
    config = SquadTaskConfig(longest_answer=3)
    best, none = best_answers(windows, scores, config)
    texts = windows[0].question.paragraph.text.split()
    expected: dict[str, float] = {}
    for number, window in enumerate(windows):
        for first in range(window.count):
            for last in range(first, min(first + 3, window.count)):
                if most_context(windows, window.first + first) == number:
                    text = " ".join(texts[window.first + first : window.first + last + 1])
                    score = float(scores[number, 4 + first, 0]) + float(scores[number, 4 + last, 1])
                    expected[text] = max(score, expected.get(text, -np.inf))
    ordered = sorted(expected, key=lambda text: -expected[text])[:20]
    assert [answer.text for answer in best] == ordered
    np.testing.assert_allclose([answer.score for answer in best], [expected[text] for text in ordered])
    np.testing.assert_allclose(none, scores[:, 0].sum(-1).min(), rtol=1e-6)


def test_a_window_without_tokens_has_no_answer():
    window = ParagraphWindow(paragraph_of(0), 0, 0)
    assert best_answers([window], np.ones((1, 8, 2)), SquadTaskConfig()) == ([], 2.0)
