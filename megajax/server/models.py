"""The model of a server, and the tokens of its prompts and messages."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megajax.config.errors import UserError
from megajax.config.read_limits import Json
from megajax.inference.images import ImageReader, ReadImage
from megajax.inference.request import Pooling, PromptImage
from megajax.inference.sampling_settings import Sampling, abbreviated
from megajax.inference.worker import Worker
from megajax.server.body import invalid
from megajax.server.request_values import RequestValues
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

PROMPT_TYPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
LONG = 4096
"""Texts with at least this many characters are tokenized on another thread, so that other requests do not wait."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A named model and its engine."""

    name: str
    worker: Worker
    tokenizer: Tokenizer
    conversation: Conversation | None
    """None without a chat template."""
    length: int
    """Maximum number of tokens of a prompt and its answer."""
    sampling: Sampling = field(default_factory=Sampling)
    """Settings of OpenAI's routes that a request does not name."""
    images: ImageReader | None = None
    """Reads images within messages; None: the model reads text alone."""
    pooling: Pooling = "last"
    """The embeddings of texts."""
    parent: str | None = None
    """For an adapter, the name of the model that it changes; its own name is that of the engine's adapter."""
    created: int = field(default_factory=lambda: int(time.time()))
    plain: Tokenizer = field(init=False)
    """Encodes text from clients: names of special tokens are plain text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.tokenizer.plain())

    @property
    def generates(self) -> bool:
        """Whether the model gives text, not embeddings alone."""
        return self.worker.engine.device.generates

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens before a text."""
        return self.tokenizer.prefix or self._around("cls")

    @property
    def suffix(self) -> Sequence[int]:
        """Tokens after a text that is not continued."""
        return self.tokenizer.suffix or self._around("sep")

    def _around(self, role: str) -> Sequence[int]:
        """The special token of this role around the texts of an encoder such as BERT."""
        return () if self.generates or role not in self.tokenizer.specials else (self.tokenizer.specials[role],)

    @property
    def reads(self) -> int:
        """Maximum number of tokens of a prompt that the model's encoder reads; 0 for a decoder alone."""
        return self.worker.engine.device.memory

    @property
    def adapter(self) -> str | None:
        """The engine's adapter for requests to this model."""
        return None if self.parent is None else self.name

    def with_adapter(self, name: str) -> "ServedModel":
        """The model with an adapter that the engine has loaded now."""
        return replace(self, name=name, parent=self.name, created=int(time.time()))

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models.

        `parent` (of an adapter), `max_model_len` and `chat_template` (whether the model answers messages) are not
        OpenAI's.
        """
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "megajax"}
        entry |= {} if self.parent is None else {"parent": self.parent}
        return entry | {"max_model_len": self.length, "chat_template": self.conversation is not None}

    async def encode(self, text: str, *, special_tokens: bool, prefix: bool, param: str = "prompt") -> list[int]:
        """Tokens of a text.

        special_tokens: whether names of special tokens become special tokens. prefix: start with `Tokenizer.prefix`.
        param: the field of the text.

        Raises RequestError for text that the tokenizer rejects.
        """
        tokenizer = self.tokenizer if special_tokens else self.plain
        tokens = await _tokens(text, lambda: tokenizer.encode(text).tolist(), param)
        return [*self.prefix, *tokens] if prefix else tokens

    async def converse(self, values: RequestValues) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Tokens and images of the messages of a request: `fields.MESSAGES` and `fields.RENDERING`.

        Raises RequestError if they have no tokens.
        """
        conversation = self.conversation
        if self.reads:
            raise invalid(
                "messages", f"{self.name} has an encoder, which reads texts and no messages: use /v1/completions"
            )
        if conversation is None:
            other = "/v1/completions" if self.generates else "/v1/embeddings"
            raise invalid("messages", f"{self.name} has no chat template: use {other}")
        messages = [_message(message) for message in values["messages"]]
        continued = values.get("continue_final_message", False)
        header = values.get("add_generation_prompt", not continued)
        if continued and header:
            raise invalid("continue_final_message", "continue_final_message needs add_generation_prompt=false")
        variables = {name: values[name] for name in ("reasoning_effort",) if name in values}
        variables |= values.get("chat_template_kwargs", {})
        if values.get("tools") and values.get("tool_choice") != "none":
            variables["tools"] = values["tools"]
        reader = self.images
        encode = partial(
            conversation.encode,
            messages,
            header=header,
            continued=continued,
            variables=variables,
            image_token=None if reader is None else reader.images.token,
        )
        pictures = await self._pictures(messages)
        text = "".join(message["content"] for message in messages if isinstance(message["content"], str))
        try:
            tokens = await _tokens(text, encode, "messages")
            return (tokens, ()) if reader is None else reader.place(tokens, pictures)
        except (TemplateMisfit, UserError) as error:
            raise invalid("messages", str(error)) from None

    async def _pictures(self, messages: Sequence[Mapping[str, Any]]) -> list[ReadImage]:
        """The pixels of the images of messages. Raises RequestError, which numbers the image from 1."""
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        files = [part["data"] for content in contents for part in content if part["type"] == "image"]
        if not files:
            return []
        if self.images is None:
            raise invalid("messages", f"{self.name} reads no images: send text alone")
        if len(files) > (most := self.images.images.most):
            raise invalid("messages", f"messages has {len(files)} images, {self.name} reads at most {most}")
        pictures = []
        for number, data in enumerate(files, start=1):
            try:
                pictures.append(await asyncio.to_thread(self.images.read, data))  # type: ignore[union-attr]
            except UserError as error:
                raise invalid("messages", f"image {number} of messages {error}") from None
        return pictures

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a client's tokens. Raises RequestError for a token outside the vocabulary."""
        self.demand_tokens(tokens, "tokens")
        return self.tokenizer.decode(tokens)

    def demand_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token outside the vocabulary."""
        size = self.tokenizer.vocabulary_size
        if unknown := [token for token in tokens if not 0 <= token < size]:
            raise invalid(
                param, f"token {abbreviated(unknown[0])} is outside the vocabulary: ids go from 0 to {size - 1}"
            )


async def _tokens(text: str, encode: Callable[[], list[int]], param: str) -> list[int]:
    try:
        return encode() if len(text) < LONG else await asyncio.to_thread(encode)
    except UserError as error:
        raise invalid(param, str(error)) from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for templates."""
    names = ("name", "tool_calls", "tool_call_id", "reasoning_content")
    more = {name: message[name] for name in names if name in message}
    return {"role": message["role"], "content": message.get("content", ""), **more}


async def read_prompts(
    values: Mapping[str, Any], model: ServedModel, most: int, name: str = "prompt", suffix: Sequence[int] = ()
) -> list[list[int]]:
    """Tokens of each prompt. name: the field of the prompts; suffix: tokens after each text.

    Raises RequestError for a value of another type, an empty prompt, more than `most` prompts, or tokens outside the
    vocabulary.
    """
    prompts = split_prompts(values.get(name, None), most, name)
    flags = values.get("special_tokens", False), values.get("add_special_tokens", True)
    return [await _encode(prompt, model, name, *flags, suffix) for prompt in prompts]


def shortened(tokens: list[int], values: Mapping[str, Any], longest: int) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt; with -1, the last `longest`."""
    most = values.get("truncate_prompt_tokens")
    return tokens if most is None else tokens[-(longest if most == -1 else most) :]


def split_prompts(value: Any, most: int, name: str = "prompt") -> list[str | list[int]]:
    """Prompts, each a text or tokens. Raises RequestError."""
    prompts = value if isinstance(value, list) and value and not _is_token(value[0]) else [value]
    if len(prompts) > most:
        raise invalid(name, f"{name} has {len(prompts):,} prompts, at most {most} are allowed")
    for prompt in prompts:
        if isinstance(prompt, list) and not all(map(_is_token, prompt)):
            invalid_part = next(part for part in prompt if not _is_token(part))
            raise invalid(name, f"{name} must be {PROMPT_TYPES}, got {abbreviated(invalid_part)} in a list")
        if not isinstance(prompt, (str, list)):
            raise invalid(name, f"{name} must be {PROMPT_TYPES}, got {abbreviated(prompt)}")
    kinds = {type(prompt) for prompt in prompts}
    if len(kinds) > 1:
        raise invalid(name, f"{name} must be {PROMPT_TYPES}, got strings and lists")
    if any(len(prompt) == 0 for prompt in prompts):
        raise invalid(name, f"{name} is empty: a model reads at least one token")
    return prompts


async def _encode(
    prompt: str | Sequence[int],
    model: ServedModel,
    name: str,
    special_tokens: bool,
    prefix: bool,
    suffix: Sequence[int],
) -> list[int]:
    if isinstance(prompt, str):
        tokens = await model.encode(prompt, special_tokens=special_tokens, prefix=prefix, param=name)
        return [*tokens, *suffix]
    model.demand_tokens(prompt, name)
    return list(prompt)


def _is_token(value: Json) -> bool:
    return type(value) is int
