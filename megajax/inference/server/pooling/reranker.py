"""Scores of pairs by the next token: rerankers that are decoders answer whether a document fits a query."""

import math
from dataclasses import dataclass

from megajax.config.errors import UserError
from megajax.inference.request import Output
from megajax.inference.sampling_settings import Sampling
from megajax.inference.server.config import ServerConfig
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import ChatTemplate, TemplateMisfit
from megajax.tokenizers.conversation import Conversation


@dataclass(frozen=True)
class Reranker:
    """A template of pairs, and the two tokens that follow it.

    The score is p(yes) / (p(yes) + p(no)), the softmax over the logits of both, as Qwen3-Reranker is trained (Zhang et
    al. 2025).
    """

    conversation: Conversation
    """Renders the messages of a pair: of the roles system (the instruction, if there is one), query and document."""
    yes: int
    no: int

    def prompt(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Tokens of a pair. Raises TemplateMisfit."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        return self.conversation.encode([*system, *messages])

    @property
    def sampling(self) -> Sampling:
        """Settings of an answer of one token with the log-probabilities of both."""
        return Sampling(max_tokens=1, temperature=0, ignore_eos=True, logprobs=2, logprob_tokens=(self.yes, self.no))

    @staticmethod
    def score(answer: Output) -> float:
        """The score of an answer, between 0 and 1."""
        (_, yes), (_, no) = answer.scores[0].top
        # Where exp would overflow, the score is 0 in float64 as well.
        return 1 / (1 + math.exp(min(no - yes, 700)))


def reranker_of(config: ServerConfig, tokenizer: Tokenizer, *, generates: bool = True) -> Reranker | None:
    """The reranker of the settings; None without `score_template`. generates: whether the model gives text.

    Raises UserError for an invalid template, for one that does not show both texts, and for an answer that is not one
    token.
    """
    if config.score_template is None:
        return None
    setting = "server.score_template"
    if not generates:
        raise UserError(f"{setting}: the model gives no text, so pairs are scored by embeddings: remove it")
    conversation = Conversation(ChatTemplate(config.score_template, setting), tokenizer)
    plain, ids = tokenizer.plain(), list[int]()
    for answer in config.score_answers:
        tokens = plain.encode(answer).tolist()
        if len(tokens) != 1:
            message = f"{answer!r} is {len(tokens)} tokens of this tokenizer, but a score needs one"
            raise UserError(f"server.score_answers: {message}. Name two answers of one token each")
        ids += tokens
    reranker = Reranker(conversation, *ids)
    try:
        pairs = [("a", "a"), ("b", "a"), ("a", "b")]
        prompts = {tuple(reranker.prompt(query, document, None)) for query, document in pairs}
    except TemplateMisfit as error:
        raise UserError(f"{setting}: {error}") from error
    if len(prompts) < len(pairs):
        raise UserError(f"{setting}: does not show the messages of the roles query and document. Write both into it")
    return reranker
