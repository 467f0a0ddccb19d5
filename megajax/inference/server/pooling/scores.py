"""Routes of scores: vLLM's /score of pairs of texts, and the /rerank of Jina and Cohere, of documents by a query.

A model of embeddings scores a pair by the cosine of the angle between both vectors; a `Reranker` by its next token.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from megajax.config.errors import UserError
from megajax.inference.request import Output, Pooling
from megajax.inference.sampling_settings import Limit, Sampling
from megajax.inference.server.body import invalid
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.fields import FLAG, NO_EFFECT, SCHEDULING, STRING, TRUNCATION, nonempty
from megajax.inference.server.models import ServedModel, read_prompts
from megajax.inference.server.openai import Job
from megajax.inference.server.pooling.embeddings import first_tokens_of
from megajax.inference.server.values import Field, Fields, Unsupported, Values, bounds
from megajax.tokenizers.chat_template import TemplateMisfit

COUNT = Limit(int, 0, 2**20)


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else nonempty(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _documents(value: Any) -> list[str]:
    return _texts([part.get("text") if isinstance(part, dict) else part for part in nonempty(value)])


def _count(value: Any) -> int:
    if COUNT.error(value):
        raise ValueError
    return value


TEXTS = Field("a string or a list of strings, none of them empty", {"type": ["string", "array"]}, _texts, required=True)
PAIRS: Fields = {
    **NO_EFFECT,
    **SCHEDULING,
    "model": STRING,
    "instruction": STRING,
    "truncate_prompt_tokens": TRUNCATION,
}
SCORE: Fields = {**PAIRS, "text_1": TEXTS, "text_2": TEXTS}
"""Fields of /score."""
RERANK: Fields = {
    **PAIRS,
    "query": Field("a string that is not empty", {"type": "string"}, lambda value: _texts([value])[0], required=True),
    "documents": Field(
        "a list of strings, or of objects with a text, none of them empty", {"type": "array"}, _documents, required=True
    ),
    "top_n": Field("an integer, at least 0", bounds(COUNT), _count),
    "return_documents": FLAG,
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), Unsupported("documents are read whole")),
    "rank_fields": Unsupported("documents are texts: write the fields into one text"),
}
"""Fields of /rerank."""


class Scoring(NamedTuple):
    """How pairs of texts are scored."""

    prompts: list[list[int]]
    sampling: Sampling
    pooling: Pooling | None
    scores: Callable[[Sequence[Output]], list[float]]
    """The answers to the prompts -> a score of each pair."""
    fields: list[str]
    """The field of each prompt: of a pair, that of its longer text."""


async def score_job(values: Values, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /score. Raises RequestError."""
    first, second = values["text_1"], values["text_2"]
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 has {len(second)}"
        raise invalid("text_1", f"{message}: give as many, or one text_1 for every text_2")
    scoring = await _scoring(first, second, values, model, config, ("text_1", "text_2"))

    def response(answers: Sequence[Output]) -> dict[str, Any]:
        scores = enumerate(scoring.scores(answers))
        data = [{"index": index, "object": "score", "score": score} for index, score in scores]
        head = {"id": f"score-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": model.name}
        return {**head, "data": data, "usage": _usage(scoring.prompts) | {"completion_tokens": 0}}

    return _job(scoring, response)


async def rerank_job(values: Values, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /rerank. Raises RequestError."""
    documents = values["documents"]
    scoring = await _scoring([values["query"]], documents, values, model, config, ("query", "documents"))

    def response(answers: Sequence[Output]) -> dict[str, Any]:
        scores = scoring.scores(answers)
        # Documents with equal scores stay in their order.
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: values.get("top_n") or None]
        with_texts = values.get("return_documents", True)
        results = [
            {"index": index, **({"document": {"text": documents[index]}} if with_texts else {})}
            | {"relevance_score": scores[index]}
            for index in best
        ]
        usage = _usage(scoring.prompts)
        return {"id": f"rerank-{uuid4().hex}", "model": model.name, "results": results, "usage": usage}

    return _job(scoring, response)


async def _scoring(
    first: list[str],
    second: list[str],
    values: Values,
    model: ServedModel,
    config: ServerConfig,
    params: tuple[str, str],
) -> Scoring:
    """Raises RequestError. first: as many texts as `second`, or one for all; params: their fields."""
    reranker = model.reranker
    count = len(second) if reranker else len(first) + len(second)
    if count > config.prompts:
        message = f"{params[1]} and {params[0]} make {count:,} prompts, at most {config.prompts} are allowed"
        raise invalid(params[1], message)
    pairs = [(first[place % len(first)], text) for place, text in enumerate(second)]
    if reranker:
        if "truncate_prompt_tokens" in values:
            message = "would cut the end of server.score_template: shorten the texts"
            raise values.invalid("truncate_prompt_tokens", message)
        try:
            prompts = [reranker.prompt(query, text, values.get("instruction")) for query, text in pairs]
        except (TemplateMisfit, UserError) as error:
            # Raises for the first texts, if the tokenizer rejects one of them.
            await read_prompts({params[0]: first}, model, config.prompts, params[0])
            raise invalid(params[1], str(error)) from None
        fields = [params[len(text) >= len(query)] for query, text in pairs]
        return Scoring(prompts, reranker.sampling, None, lambda answers: list(map(reranker.score, answers)), fields)
    if "instruction" in values:
        raise values.invalid("instruction", "has a place only in server.score_template: write it into the texts")
    prompts, fields = list[list[int]](), list[str]()
    for param, texts in zip(params, (first, second), strict=True):
        read = await read_prompts({param: texts}, model, config.prompts, param, model.suffix)
        prompts += [first_tokens_of(prompt, values, model) for prompt in read]
        fields += [param] * len(texts)

    def cosines(answers: Sequence[Output]) -> list[float]:
        vectors = [answer.embedding for answer in answers]
        queries, others = vectors[: len(first)], vectors[len(first) :]
        products = [math.sumprod(queries[place % len(queries)], other) for place, other in enumerate(others)]
        return [max(-1.0, min(1.0, product)) for product in products]

    return Scoring(prompts, Sampling(max_tokens=0), model.pooling, cosines, fields)


def _usage(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _job(scoring: Scoring, response: Callable[[Sequence[Output]], dict[str, Any]]) -> Job:
    return Job(
        prompts=scoring.prompts,
        sampling=scoring.sampling,
        response=response,
        names={},
        pooling=scoring.pooling,
        fields=scoring.fields,
    )
