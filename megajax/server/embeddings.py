"""OpenAI's route of embeddings: a vector of each text."""

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from megajax.inference.request import Output
from megajax.inference.sampling_settings import Length, Sampling
from megajax.server.body import invalid
from megajax.server.config import ServerConfig
from megajax.server.fields import FLAG, NO_EFFECT, PROMPT, SCHEDULING, STRING, TRUNCATION
from megajax.server.models import ServedModel, read_prompts
from megajax.server.openai import Job
from megajax.server.request_values import Field, Fields, RequestValues, Unsupported, choice, within

EMBEDDINGS: Fields = {
    **NO_EFFECT,
    **SCHEDULING,
    "model": STRING,
    "input": PROMPT,
    "encoding_format": choice("float", "base64"),
    "dimensions": Field("an integer, at least 1", within(Length)),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "truncate_prompt_tokens": TRUNCATION,
    "input_type": Unsupported("write the instruction into the text"),
}
"""Fields of /v1/embeddings."""


class EmbeddingForm:
    """Format of /v1/embeddings."""

    def __init__(self, model: ServedModel, prompts: Sequence[Sequence[int]], values: RequestValues):
        self._name, self._tokens = model.name, sum(map(len, prompts))
        self._dimensions, self._binary = values.get("dimensions"), values.get("encoding_format") == "base64"

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        """The vectors. Raises RequestError if they have fewer dimensions than requested."""
        data = [
            {"object": "embedding", "index": answer.choice, "embedding": self._vector(answer.embedding)}
            for answer in answers
        ]
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return {"object": "list", "data": data, "model": self._name, "usage": usage}

    def _vector(self, vector: Sequence[float]) -> list[float] | str:
        if self._dimensions is not None:
            if self._dimensions > len(vector):
                message = f"dimensions is {self._dimensions}, embeddings of this model have {len(vector)}"
                raise invalid("dimensions", message)
            vector = vector[: self._dimensions]
            norm = math.hypot(*vector) or 1.0
            vector = [value / norm for value in vector]
        # Clients read the bytes as little-endian float32.
        return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if self._binary else list(vector)


def first_tokens_of(prompt: list[int], values: RequestValues, model: ServedModel) -> list[int]:
    """The first `truncate_prompt_tokens` tokens of a prompt, with the tokens after every text; with -1, as many as
    fit."""
    most, suffix = values.get("truncate_prompt_tokens", len(prompt)), list(model.suffix)
    most = model.length if most == -1 else most
    if len(prompt) <= most:
        return prompt
    ending = suffix if suffix and prompt[-len(suffix) :] == suffix and len(suffix) < most else []
    return prompt[: most - len(ending)] + ending


async def embedding_job(values: RequestValues, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/embeddings. Raises RequestError."""
    suffix = model.suffix if values.get("add_special_tokens", True) else ()
    prompts = await read_prompts(values, model, config.prompts, "input", suffix)
    prompts = [first_tokens_of(prompt, values, model) for prompt in prompts]
    form, names = EmbeddingForm(model, prompts, values), {"prompt": "input"}
    sampling = Sampling(max_tokens=0)
    return Job(prompts=prompts, sampling=sampling, response=form.response, names=names, pooling=model.pooling)
