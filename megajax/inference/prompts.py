"""A file of prompts, and a file of their answers; imports neither jax nor flax."""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from megajax.config.errors import UserError
from megajax.config.markup import read_json
from megajax.inference.request import Answer, TokenScore
from megajax.tokenizers.base import Tokenizer, start_token, with_prefix
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

ROLES = ("system", "user", "assistant", "tool")


class Prompt(NamedTuple):
    """A prompt of a file."""

    where: str
    """File and line, for messages."""
    content: str | list[int] | list[dict[str, Any]]
    """A text, token ids, or the messages of a conversation."""

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Each line is a prompt; in .jsonl files an object with `prompt`, a text or token ids, or `messages`.

    Blank lines are left out. Raises UserError that names the line.
    """
    try:
        # A byte order mark, which other systems write, is no part of the first prompt.
        lines = path.read_bytes().removeprefix(BOM_UTF8).decode("utf-8").split("\n")
    except OSError as error:
        raise UserError(f"--prompts={path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts={path}: byte {error.start} is not UTF-8 text: convert the file") from error
    jsonl = path.suffix in (".jsonl", ".ndjson")
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts={path}: has no prompts: write one in each line")
    return [Prompt(where, _content(line, where) if jsonl else line.rstrip("\r")) for where, line in numbered]


def _content(line: str, where: str) -> Any:
    """What an object holds. Raises UserError for one that is no prompt."""
    wanted = 'expected {"prompt": "text"}, {"prompt": [1, 2, 3]} or {"messages": [{"role": "user", "content": "text"}]}'
    try:
        value = read_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON as it is read here: {error}; {wanted}") from error
    if not isinstance(value, dict) or len(value.keys() & {"prompt", "messages"}) != 1:
        raise UserError(f"{where}: {wanted}")
    if unknown := value.keys() - {"prompt", "messages"}:
        raise UserError(f"{where}: unknown field {min(unknown)!r}; {wanted}")
    content = value.get("prompt", value.get("messages"))
    if "prompt" in value:
        ids = isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)
        right = isinstance(content, str) or ids
    else:
        right = isinstance(content, list) and bool(content) and all(map(_is_message, content))
    if not right:
        raise UserError(f"{where}: {wanted}; roles are {', '.join(ROLES)}")
    return content


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def encode(prompt: Prompt, tokenizer: Tokenizer, conversation: Conversation | None) -> tuple[int, ...]:
    """The ids of a prompt. Raises UserError for a conversation without a chat template, or that it refuses."""
    content: Any = prompt.content
    if isinstance(content, str):
        return tuple(with_prefix(tokenizer, content).tolist()) or (start_token(tokenizer),)
    if not prompt.is_conversation:
        return tuple(content)
    try:
        return tuple(demand_conversation(conversation, prompt.where).encode(content))
    except TemplateMisfit as error:
        raise UserError(f"{prompt.where}: {error}") from error


def demand_conversation(conversation: Conversation | None, where: str) -> Conversation:
    """Raises UserError for a model without a chat template. where: what needs it."""
    if conversation is None:
        raise UserError(
            f"{where}: the model has no chat template. Set inference.template to a file with one, or to a name: "
            "plain or chatml"
        )
    return conversation


def as_json(answer: Answer) -> dict[str, Any]:
    """text, tokens, finish; with scores `logprobs` and `top_logprobs`, and those of the prompt."""
    made: dict[str, Any] = {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
    made |= _scores("", answer.scores) if answer.scores else {}
    return made | (_scores("prompt_", answer.prompt_scores) if answer.prompt_scores else {})


def _scores(before: str, scores: Sequence[TokenScore | None]) -> dict[str, Any]:
    """Log-probabilities of the tokens and of the most likely ones."""
    given = {f"{before}logprobs": [score and score.logprob for score in scores]}
    if any(score and score.top for score in scores):
        given[f"{before}top_logprobs"] = [score and [list(pair) for pair in score.top] for score in scores]
    return given


class AnswerFile:
    """A .jsonl file of answers in the order of the prompts, a line for each: `index`, `choice`, the answer, `key`.

    What an interrupted attempt wrote of whole prompts stays; `done` says of how many.
    """

    def __init__(self, path: Path, choices: int, keys: Sequence[str]):
        """choices: answers of a prompt; keys: for each prompt a digest of all that its answers depend on.

        Raises UserError for a file of other answers, and one that cannot be written.
        """
        self._keys, self.done = keys, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            end = 0
            while lines := [line for _ in range(choices) if (line := self._file.readline())]:
                if not all(self._is_answer(line, choice) for choice, line in enumerate(lines)):
                    what = f"{path} has answers to other prompts, by other settings or of another model"
                    raise UserError(f"--output={path}: {what}, from prompt {self.done} on: name another file")
                if len(lines) < choices or not lines[-1].endswith(b"\n"):
                    break
                self.done, end = self.done + 1, self._file.tell()
            self._file.truncate(end)
        except OSError as error:
            raise UserError(f"--output={path}: cannot be written: {error.strerror or error}") from error

    def _is_answer(self, line: bytes, choice: int) -> bool:
        """Whether a line is of the prompt behind those that are done. A line without its end may be the last one that
        was being written: what it begins with has to be right, or the file is not ours to cut."""
        if not line.endswith(b"\n"):
            begins = b'{"index": %d, "choice": %d, "text": "' % (self.done, choice)
            return self.done < len(self._keys) and line[: len(begins)] == begins[: len(line)]
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return False
        key = self._keys[self.done] if self.done < len(self._keys) else None
        return isinstance(value, dict) and (value.get("choice"), value.get("key")) == (choice, key)

    def write(self, answers: Sequence[Answer]) -> None:
        """The answers to the next prompt."""
        for choice, answer in enumerate(answers):
            line = {"index": self.done, "choice": choice, **as_json(answer), "key": self._keys[self.done]}
            self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n")
        self._file.flush()
        self.done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
