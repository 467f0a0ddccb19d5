"""A model with lm-evaluation-harness's interface. Imports lm_eval: see `megajax.tasks.harness`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM

from megajax.config.errors import UserError
from megajax.tasks.greedy_generation import Generation, generate
from megajax.tasks.loglikelihood import Continuation, log_likelihoods, why_no_tokens
from megajax.tokenizers.base import start_token, with_prefix
from megajax.training.scorer import Scorer

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the maximum number of new tokens; the first one that is given counts."""


class HarnessModel(TemplateLM):
    """Answers lm-eval's three kinds of requests; every process answers all of them.

    Attributes:
        truncated: number of contexts whose beginning was cut because they were longer than a row; a context of several
            choices counts once.
    """

    def __init__(self, scorer: Scorer, generated: int):
        """generated: maximum tokens of a text, if the task does not set it."""
        super().__init__()
        self._scorer, self._generated, self.truncated = scorer, generated, 0
        self._instances: Sequence[Any] = ()

    @property
    def eot_token_id(self) -> int:
        return self._scorer.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return start_token(self._scorer.tokenizer)

    @property
    def max_length(self) -> int:
        return self._scorer.length

    @property
    def max_gen_toks(self) -> int:
        return self._generated

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Ids of a text after the tokenizer's prefix, as in lm-eval's HFLM. add_special_tokens: False for no prefix."""
        del kwargs
        tokenizer = self._scorer.tokenizer
        return (tokenizer.encode(string) if add_special_tokens is False else with_prefix(tokenizer, string)).tolist()

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Without lm-eval's progress bar of tokenisation."""
        del disable_tqdm
        self._instances = requests
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """[(texts, context, continuation)] -> [(log-probability, whether it is greedy)]."""
        del kwargs
        instances, self._instances = self._instances, ()
        for (_, _, continuation), instance in zip(requests, instances, strict=False):
            if not len(continuation):
                where = f"lm-eval:{instance.task_name}, line {instance.doc_id + 1} of its data, choice {instance.idx}"
                raise UserError(f"{where}: a continuation has 0 tokens: {why_no_tokens(instance.args[1])}")
        pairs = [Continuation(np.array(context), np.array(continuation)) for _, context, continuation in requests]
        answers = log_likelihoods(self._scorer, pairs)
        texts = [text for (text, _, _), answer in zip(requests, answers, strict=True) if answer.truncated]
        self.truncated += len({text[0] for text in texts})
        return [(answer.value, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, with windows that count every token once."""
        texts: list[tuple[Any, Any, Any]] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            pairs = utils.get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            windows = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            texts += windows
            counts.append(len(windows))
        values = [value for value, _ in self._loglikelihood_tokens(texts)]
        stops = np.cumsum(counts)
        return [float(sum(values[stop - count : stop])) for stop, count in zip(stops, counts, strict=True)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts. Raises UserError for a task that samples."""
        return generate(self._scorer, [self._generation(*request.args) for request in requests])

    def _generation(self, context: str, settings: Mapping[str, Any]) -> Generation:
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            temperature = settings.get("temperature", 1.0)
            raise UserError(f"a task samples at temperature {temperature}, but only greedy decoding is supported")
        most = next((settings[name] for name in LIMITS if settings.get(name) is not None), self._generated)
        until = settings.get("until") or []
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        self.truncated += len(prompt) > self.max_length - most
        stops = [until] if isinstance(until, str) else list(until)
        return Generation(np.array(prompt, np.int32), int(most), stops)
