"""Log-likelihoods of continuations after their contexts, and two tasks of them: LAMBADA and multiple choice."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.tasks.config import ChoicesConfig, LambadaConfig
from megajax.tasks.read_jsonl import read_lines
from megajax.tasks.statistics import Figure, Figures, exponential, mean, ratio
from megajax.tokenizers.base import Tokenizer, start_token, with_prefix
from megajax.training.scorer import Scorer, Window


class Continuation(NamedTuple):
    """Token ids, int32 [C] and [N], neither empty."""

    context: np.ndarray
    continuation: np.ndarray


class LogLikelihood(NamedTuple):
    """The log-likelihood of a continuation."""

    value: float
    """Log-probability of the continuation, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""
    tokens: int
    truncated: bool
    """Whether the context lost tokens."""


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Continuation:
    """The ids of both texts, split as in lm-eval.

    The texts are encoded together, so that a token may include the space before a word; spaces at the end of the
    context belong to the continuation. The tokenizer's prefix comes first; an empty context becomes `start_token`.
    """
    stripped = context.rstrip()
    if not stripped:
        tokens = tokenizer.encode(context + continuation)
        return Continuation(np.array([start_token(tokenizer)], np.int32), tokens)
    tokens, prefix = with_prefix(tokenizer, context + continuation), with_prefix(tokenizer, stripped)
    return Continuation(tokens[: len(prefix)], tokens[len(prefix) :])


def why_no_tokens(text: str) -> str:
    """The reason why a continuation with this text has no tokens, for messages."""
    if not text:
        return "its text is empty"
    return f"after its context, {text[:60]!r} has no more tokens than the context alone: begin it with a space"


def log_likelihoods(scorer: Scorer, requests: Sequence[Continuation]) -> list[LogLikelihood]:
    """The log-likelihoods in the order of the requests. Contexts that do not fit are truncated at their beginning.

    Raises UserError for a continuation that is empty or longer than a row.
    """
    windows = [_window(request, scorer.length) for request in requests]
    return [
        LogLikelihood(
            value=answer.log_probability,
            greedy=answer.right == window.counted,
            tokens=window.counted,
            truncated=len(window.tokens) < len(request.context) + len(request.continuation),
        )
        for request, window, answer in zip(requests, windows, scorer.answers(windows), strict=True)
    ]


def _window(request: Continuation, length: int) -> Window:
    """The last `length` + 1 tokens of a request."""
    count = len(request.continuation)
    if not 0 < count <= length:
        raise UserError(f"a continuation has {count} tokens, but the model scores 1 to {length}")
    tokens = np.concatenate([request.context, request.continuation]).astype(np.int32)
    return Window(tokens[-(length + 1) :], count)


def truncated_contexts(count: int) -> dict[str, Figure]:
    """The figure of contexts that lost tokens, if there are any."""
    return {"truncated_contexts": Figure(count)} if count else {}


def demand_ids(tokens: np.ndarray, scorer: Scorer, owner: str) -> None:
    """Raises UserError for an id of `tokens`, int [N], that the model does not have."""
    below = scorer.program.cfg.model.schema()["tokens"].below
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or (below is not None and largest >= below):
        ids = "0 or more" if below is None else f"0 to {below - 1}"
        raise UserError(
            f"{owner} has token {least if least < 0 else largest}, but the model's ids are {ids}: it comes from "
            "another tokenizer. Prepare it with the run's tokenizer."
        )


def cloze(tokenizer: Tokenizer, text: str, *, strict: bool) -> Continuation:
    """A text split before its last word if `strict`, else before its last token, as in Megatron-LM.

    The last word is encoded with a space before it, the text before it without spaces around it.
    """
    if not strict:
        tokens = tokenizer.encode(text)
        return Continuation(tokens[:-1], tokens[-1:])
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    return Continuation(tokenizer.encode(before), tokenizer.encode(f" {word}"))


class Lambada:
    """LAMBADA (Paperno et al. 2016).

    `accuracy`: the share of texts whose last word is predicted greedily, with all its tokens. `perplexity` is per last
    word, `loss` per token of it.
    """

    def __init__(self, config: LambadaConfig, scorer: Scorer):
        """Raises UserError for a line without a text of two words."""
        self._scorer, self._requests = scorer, list[Continuation]()
        for number, line in read_lines(config.path, {"text": str}):
            if len(line["text"].split()) < 2:
                raise UserError(f"{config.path}, line {number}: text is {line['text']!r}, but needs two words.")
            request = cloze(scorer.tokenizer, line["text"], strict=config.strict)
            if not 0 < len(request.continuation) <= scorer.length or not len(request.context):
                sizes = f"{len(request.context)} tokens and an end of {len(request.continuation)}"
                raise UserError(f"{config.path}, line {number}: has {sizes}; rows of the model have {scorer.length}.")
            demand_ids(np.concatenate(request), scorer, f"{config.path}, line {number}:")
            self._requests.append(request)

    def __call__(self) -> Figures:
        answers = log_likelihoods(self._scorer, self._requests)
        losses = [-answer.value for answer in answers]
        figures = {
            "accuracy": mean([answer.greedy for answer in answers]),
            "perplexity": exponential(mean(losses)),
            "loss": ratio(losses, [answer.tokens for answer in answers]),
        }
        return figures | truncated_contexts(sum(answer.truncated for answer in answers))


class ChoiceQuestion(NamedTuple):
    """One line of the file."""

    requests: Sequence[Continuation]
    """One request for each choice."""
    sizes: np.ndarray
    """UTF-8 bytes of each choice."""
    answer: int


class Choices:
    """Multiple choice: the choice with the largest log-likelihood after the context.

    `accuracy`: by log-likelihood; `accuracy_norm`: by log-likelihood over the bytes of the choice.

    `loss` is the mean over tokens of the correct choices. Of equally likely choices the first is taken, as in lm-eval.
    """

    def __init__(self, config: ChoicesConfig, scorer: Scorer):
        """Raises UserError for an invalid line."""
        self._scorer, self._questions = scorer, list[ChoiceQuestion]()
        for number, line in read_lines(config.path, {"context": str, "choices": list, "answer": int}):
            place, choices = f"{config.path}, line {number}:", line["choices"]
            if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
                raise UserError(f"{place} choices must be two texts or more, got {choices}.")
            if not 0 <= line["answer"] < len(choices):
                raise UserError(f"{place} answer is {line['answer']}, the choices are 0 to {len(choices) - 1}.")
            requests = [encode_pair(scorer.tokenizer, line["context"], config.delimiter + choice) for choice in choices]
            for number, (request, choice) in enumerate(zip(requests, choices, strict=True)):
                if not len(request.continuation):
                    reason = why_no_tokens(config.delimiter + choice)
                    raise UserError(f"{place} choice {number} has 0 tokens: {reason}.")
                if len(request.continuation) > scorer.length:
                    sizes = f"a choice of {len(request.continuation)} tokens; rows of the model have {scorer.length}"
                    raise UserError(f"{place} has {sizes}.")
                demand_ids(np.concatenate(request), scorer, place)
            sizes = np.array([len(choice.encode("utf-8", errors="surrogatepass")) for choice in choices])
            self._questions.append(ChoiceQuestion(requests, sizes, line["answer"]))

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
