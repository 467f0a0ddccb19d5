"""The model that a server answers for, and how prompts become its tokens."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.server.errors import RequestError, invalid
from megajax.inference.server.fields import shown
from megajax.inference.worker import Worker
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

ROLES = ("system", "developer", "user", "assistant")
LONG = 4096
"""Characters from which text is tokenised on another thread, so that others are answered meanwhile."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model under a name, on the engine that runs it."""

    name: str
    worker: Worker
    tokenizer: Tokenizer
    conversation: Conversation | None
    """None: the tokenizer has no chat template."""
    length: int
    """Most tokens of a prompt and its answer."""
    created: int = field(default_factory=lambda: int(time.time()))
    plain: Tokenizer = field(init=False)
    """Encodes text of clients: names of special tokens in it are text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.tokenizer.plain())

    def demand_name(self, values: Mapping[str, Any]) -> None:
        """Raises RequestError 404 if the field `model` names another one."""
        if (name := values.get("model", self.name)) != self.name:
            raise RequestError(404, f"no model {shown(name)}: there is {self.name}", "model")

    def card(self) -> dict[str, Any]:
        """Its entry in /v1/models."""
        own = {"id": self.name, "object": "model", "created": self.created, "owned_by": "megajax"}
        return own | {"max_model_len": self.length}

    async def encode(self, text: str, *, special_tokens: bool, prefix: bool) -> list[int]:
        """Tokens of a text.

        special_tokens: names of special tokens in the text are special tokens. prefix: begin with `Tokenizer.prefix`.

        Raises RequestError for text that the tokenizer does not take.
        """
        tokenizer = self.tokenizer if special_tokens else self.plain
        tokens = await _tokens(text, lambda: tokenizer.encode(text).tolist())
        return [*self.tokenizer.prefix, *tokens] if prefix else tokens

    async def converse(self, messages: Any) -> list[int]:
        """Tokens of messages as a client sends them, with the header of an answer. Raises RequestError."""
        conversation = self.conversation
        if conversation is None:
            raise invalid("messages", f"{self.name} has no chat template: use /v1/completions")
        checked = check_messages(messages)
        text = "".join(str(message["content"]) for message in checked)
        try:
            return await _tokens(text, lambda: conversation.encode(checked), "messages")
        except TemplateMisfit as error:
            raise invalid("messages", str(error)) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens from a client. Raises RequestError for one outside the vocabulary."""
        self.demand_tokens(tokens, "tokens")
        return self.tokenizer.decode(tokens)

    def demand_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token outside the vocabulary."""
        size = self.tokenizer.vocabulary_size
        if wrong := [token for token in tokens if not 0 <= token < size]:
            raise invalid(param, f"token {shown(wrong[0])} is outside the vocabulary: ids go from 0 to {size - 1}")


async def _tokens(text: str, encode: Callable[[], list[int]], param: str = "prompt") -> list[int]:
    try:
        return encode() if len(text) < LONG else await asyncio.to_thread(encode)
    except UserError as error:
        raise invalid(param, str(error)) from None


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Messages with a role and a text. Raises RequestError that names the place."""
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"messages must be a list with a message or more, got {shown(messages)}")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, f"{where} must be an object with role and content, got {shown(message)}")
    if unknown := message.keys() - {"role", "content", "name"}:
        name = min(unknown)[:60]
        raise invalid(f"{where}.{name}", f"unknown field {name!r} in {where}: it has role, content and name")
    role, content, name = message.get("role"), message.get("content"), message.get("name")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid(f"{where}.content", f"{where}.content must be a string, got {shown(content)}")
    if name is not None and not isinstance(name, str):
        raise invalid(f"{where}.name", f"{where}.name must be a string, got {shown(name)}")
    # Templates know `system`, which OpenAI has renamed.
    checked = {"role": "system" if role == "developer" else role, "content": content}
    return checked if name is None else {**checked, "name": name}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
        raise invalid(where, f"{where} must be an object with type text and the text: other types are not supported")
    if not isinstance(part["text"], str):
        raise invalid(where, f"{where}.text must be a string, got {shown(part['text'])}")
    return part["text"]
