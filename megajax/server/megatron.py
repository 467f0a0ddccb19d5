"""Megatron-LM's route PUT /api: fields, defaults and answers; errors have their proper status."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from megajax.config.bounds import Bounds, Share
from megajax.inference.request import Output
from megajax.inference.sampling_settings import Sampling, TokenId
from megajax.server.body import invalid
from megajax.server.config import ServerConfig
from megajax.server.fields import FLAG, STRING
from megajax.server.models import ServedModel, split_prompts
from megajax.server.openai import Job, TokenTexts, finite
from megajax.server.request_values import Field, Fields, RequestValues, Unsupported, number, within

WARM = Annotated[float, Bounds(above=0, at_most=100)]
FIELDS: Fields = {
    "prompts": Field("a list of strings", required=True),
    "model": STRING,
    "tokens_to_generate": number("max_tokens"),
    "logprobs": FLAG,
    "temperature": Field("a number above 0 and at most 100", within(WARM), "temperature"),
    "top_k": Field("an integer between 0 and 1000", within(Annotated[int, Bounds(at_least=0, at_most=1000)]), "top_k"),
    "top_p": Field("a number between 0 and 1", within(Share)),
    **dict.fromkeys(("top_p_decay", "top_p_bound"), Unsupported("must be 0: top_p does not decay here", (0,))),
    "add_BOS": FLAG,
    "stop_on_eol": FLAG,
    "stop_on_double_eol": FLAG,
    "prevent_newline_after_colon": Unsupported("must be false: tokens are not forbidden after others here", (False,)),
    "random_seed": number("seed"),
    "no_log": FLAG,
    "beam_width": number("beams"),
    "stop_token": Field("a token id", within(TokenId)),
    "length_penalty": number("length_penalty"),
    "max_len": Unsupported("replaced by tokens_to_generate"),
    "sentences": Unsupported("replaced by prompts"),
}
"""Fields of PUT /api: those of Megatron-LM, and `model`."""


class MegatronForm:
    """Texts including prompts, tokens, segments (the text of each token) and log-probabilities."""

    def __init__(self, model: ServedModel, prompts: Sequence[Sequence[int]], settings: Sampling, *, scored: bool):
        self._tokenizer, self._texts = model.tokenizer, TokenTexts(model.tokenizer)
        self._prompts, self._settings, self._scored = prompts, settings, scored

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        prompts = [self._prompts[answer.choice // self._settings.n] for answer in answers]
        pairs = list(zip(prompts, answers, strict=True))
        tokens = [[*prompt, *answer.tokens] for prompt, answer in pairs]
        body: dict[str, Any] = {
            "text": [self._tokenizer.decode(prompt) + answer.text for prompt, answer in pairs],
            "tokens": tokens,
            "segments": [[self._texts.text(token) for token in row] for row in tokens],
        }
        if self._settings.beams > 1:
            body["scores"] = [self._score(answer) for answer in answers]
        if self._scored:
            # All tokens except the first, which has no prediction.
            scores_by_answer = [(*answer.prompt_scores[1:], *answer.scores) for answer in answers]
            body["logprobs"] = [[finite(score.logprob) for score in scores if score] for scores in scores_by_answer]
        return body

    def _score(self, answer: Output) -> float:
        """Score of a beam: its log-probability divided by its length to the power of length_penalty."""
        length = max(len(answer.tokens), 1) ** self._settings.length_penalty
        return finite(math.fsum(score.logprob for score in answer.scores) / length)


async def megatron_job(values: RequestValues, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of PUT /api. Raises RequestError."""
    settings, scored = _settings(values), values.get("logprobs", False)
    texts = values["prompts"]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise invalid("prompts", "prompts must be a list of strings")
    if settings.beams > 1 and len(texts) > 1:
        raise invalid("prompts", f"a beam search takes one prompt, got {len(texts)}")
    add_bos = values.get("add_BOS", False)
    if not add_bos or len(texts) > config.prompts:
        if not all(texts):
            raise invalid("prompts", "an empty prompt needs add_BOS=true")
        split_prompts(texts, config.prompts, "prompts")
    tokenizer = model.tokenizer
    first = [tokenizer.specials.get("bos", tokenizer.eod)] if add_bos else []
    prompts = [first + await model.encode(text, special_tokens=False, prefix=False) for text in texts]
    form = MegatronForm(model, prompts, settings, scored=scored)
    names = values.names() | {"prompt": "prompts", "top_p": "top_p", "n": "beam_width"}
    return Job(prompts=prompts, sampling=settings, response=form.response, names=names)


def _settings(values: RequestValues) -> Sampling:
    """Raises RequestError for settings that contradict each other."""
    top_p = values.get("top_p", 0.0)
    if top_p > 0 and values.get("top_k", 0) > 0:
        raise invalid("top_p", f"top_p={top_p:g} and top_k={values['top_k']} are given: give one of them")
    settings = values.sampling(Sampling(max_tokens=64))
    if settings.max_tokens == 0 and not values.get("logprobs", False):
        raise invalid("tokens_to_generate", "tokens_to_generate=0 needs logprobs=true")
    stop = ("\n\n",) * values.get("stop_on_double_eol", False) + ("\n",) * values.get("stop_on_eol", False)
    settings = replace(settings, top_p=top_p or 1.0, stop=stop, n=settings.beams)
    if "stop_token" in values:
        # Replaces the end-of-document token.
        settings = replace(settings, stop_tokens=(values["stop_token"],), ignore_eos=True)
    if settings.beams > 1 or values.get("logprobs", False):
        settings = replace(settings, logprobs=0)
    return replace(settings, prompt_logprobs=0) if values.get("logprobs", False) else settings
