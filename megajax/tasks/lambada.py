"""LAMBADA: prediction of the last word of a text (Paperno et al. 2016)."""

from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.tasks.config import LambadaConfig
from megajax.tasks.files import read_lines
from megajax.tasks.loglikelihood import Request, demand_ids, log_likelihoods, truncated_contexts
from megajax.tasks.statistics import exponential, mean, ratio
from megajax.training.scoring import Figures, Scorer


def cloze(tokenizer: Any, text: str, *, strict: bool) -> Request:
    """A text split before its last word if `strict`, else before its last token, as in Megatron-LM.

    The last word is encoded with a space before it, the text before it without spaces around it.
    """
    if not strict:
        tokens = tokenizer.encode(text)
        return Request(tokens[:-1], tokens[-1:])
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    return Request(tokenizer.encode(before), tokenizer.encode(f" {word}"))


class Lambada:
    """`accuracy`: the share of texts whose last word is predicted greedily, with all its tokens.

    `perplexity` is per last word, `loss` per token of it.
    """

    def __init__(self, config: LambadaConfig, scorer: Scorer):
        """Raises UserError for a line without a text of two words."""
        self._scorer, self._requests = scorer, list[Request]()
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
