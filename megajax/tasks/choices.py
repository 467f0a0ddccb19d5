"""Multiple choice: the choice with the largest log-likelihood after the context."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.tasks.config import ChoicesConfig
from megajax.tasks.files import read_lines
from megajax.tasks.loglikelihood import Request, demand_ids, encode_pair, log_likelihoods, truncated_contexts
from megajax.tasks.statistics import mean, ratio
from megajax.training.scoring import Figures, Scorer


class Question(NamedTuple):
    """One line of the file."""

    requests: Sequence[Request]
    """One request for each choice."""
    sizes: np.ndarray
    """UTF-8 bytes of each choice."""
    answer: int


class Choices:
    """`accuracy`: by log-likelihood; `accuracy_norm`: by log-likelihood over the bytes of the choice.

    `loss` is the mean over tokens of the correct choices. Of equally likely choices the first is taken, as in lm-eval.
    """

    def __init__(self, config: ChoicesConfig, scorer: Scorer):
        """Raises UserError for an invalid line."""
        self._scorer, self._questions = scorer, list[Question]()
        for number, line in read_lines(config.path, {"context": str, "choices": list, "answer": int}):
            place, choices = f"{config.path}, line {number}:", line["choices"]
            if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
                raise UserError(f"{place} choices must be two texts or more, got {choices}.")
            if not 0 <= line["answer"] < len(choices):
                raise UserError(f"{place} answer is {line['answer']}, the choices are 0 to {len(choices) - 1}.")
            requests = [encode_pair(scorer.tokenizer, line["context"], config.delimiter + choice) for choice in choices]
            for request in requests:
                if not 0 < len(request.continuation) <= scorer.length:
                    sizes = f"a choice of {len(request.continuation)} tokens; rows of the model have {scorer.length}"
                    raise UserError(f"{place} has {sizes}.")
                demand_ids(np.concatenate(request), scorer, place)
            sizes = np.array([len(choice.encode("utf-8", errors="surrogatepass")) for choice in choices])
            self._questions.append(Question(requests, sizes, line["answer"]))

    def __call__(self) -> Figures:
        requests = [request for question in self._questions for request in question.requests]
        answers, truncated = iter(log_likelihoods(self._scorer, requests)), 0
        correct, correct_norm, losses, tokens = list[float](), list[float](), list[float](), list[int]()
        for question in self._questions:
            question_answers = [next(answers) for _ in question.requests]
            values = np.array([answer.value for answer in question_answers])
            correct.append(int(values.argmax()) == question.answer)
            correct_norm.append(int((values / question.sizes).argmax()) == question.answer)
            losses.append(-question_answers[question.answer].value)
            tokens.append(question_answers[question.answer].tokens)
            truncated += any(answer.truncated for answer in question_answers)
        figures = {"accuracy": mean(correct), "accuracy_norm": mean(correct_norm), "loss": ratio(losses, tokens)}
        return figures | truncated_contexts(truncated)
