"""The prompts of rollouts, in an order that depends on a seed and their number alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.read_limits import json_fault, utf8_text
from megajax.data.chat.choose_template import template_of
from megajax.data.rows.row_source import data_seed
from megajax.data.rows.splits import Rows, Splits
from megajax.inference.prompt_and_answer_files import Prompt, demand_messages, encode
from megajax.storage.local_copies import local_file
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.conversation import Conversation
from megajax.tuning import digit_sums
from megajax.tuning.config import DigitSumsConfig, RolloutsConfig
from megajax.tuning.rollouts import Rollouts

FORMS = 'expected an object with "prompt": a text, token ids, or messages such as [{"role": "user", "content": "…"}]'


class PromptLine(NamedTuple):
    """A line of a file."""

    row: Mapping[str, Any]
    tokens: tuple[int, ...]


class PromptSource:
    """The training split: its rows are made during the run, by the batches of `batches`.

    Attributes:
        lines: the prompts.
        skipped: reason -> number, of what rollouts have left out.
    """

    def __init__(self, cfg: RolloutsConfig, lines: Sequence[PromptLine], rows: int | None, seed: int):
        self.cfg, self.lines, self.seed = cfg, lines, data_seed(cfg.seed, seed)
        self.skipped: dict[str, int] = {}
        self._rows = rows or len(self.lines)
        self._order = lru_cache(2)(lambda epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self.lines)))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Mapping[str, np.ndarray]:
        raise UserError("rows of rollouts are made while the run trains, and can't be read by number")

    def files(self) -> list[str]:
        """The files of prompts, of reward functions and of the reward model."""
        functions = [reference.rpartition(":")[0] for reference in self.cfg.rewards]
        code = [file for file in functions if file.endswith(".py") and Path(file).is_file()]
        return [*self.cfg.paths, *code, *(model_files(self.cfg.reward_model) if self.cfg.reward_model else ())]

    def line(self, number: int) -> PromptLine:
        """The prompt with this number, from 0 on, over all epochs."""
        epoch, place = divmod(number, len(self.lines))
        return self.lines[self._order(epoch)[place]]

    def batches(self, parts: Any, consumed: int, progress: Callable[[], None]) -> Rollouts:
        """The batches of the run of these parts after `consumed` rows. progress: called now and then in a rollout.

        Raises UserError for settings that do not fit the model, and for reward functions that can't be loaded.
        """
        return Rollouts(self, parts, consumed, progress)


def build_splits(cfg: RolloutsConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Training rows only. Raises UserError for files that can't be read, and invalid lines."""
    del schema
    return Splits(PromptSource(cfg, read_lines(cfg, tokenizer), rows.train, seed), None, None)


def build_digit_sums(cfg: DigitSumsConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """`build_splits` of digit sums. Raises UserError for a tokenizer that needs more tokens than a prompt may have."""
    del schema
    encoder = _PromptEncoder(cfg, tokenizer)
    lines = [encoder(row, "digit sums") for row in digit_sums.lines()]
    return Splits(PromptSource(cfg, lines, rows.train, seed), None, None)


def model_files(source: str) -> list[str]:
    """The files of hf:DIR; of a run, the manifest of its newest step, which has the checksums of the others."""
    folder = Path(source.removeprefix("hf:")).expanduser()
    if source.startswith("hf:"):
        return sorted(str(path) for pattern in ("config.json", "*.safetensors") for path in folder.glob(pattern))
    steps = ("checkpoints/*/manifest.json", "*/manifest.json", "manifest.json")
    return [str(path) for pattern in steps for path in sorted(folder.glob(pattern))][-1:]


def read_lines(cfg: RolloutsConfig, tokenizer: Tokenizer) -> list[PromptLine]:
    """The prompts of all files. Raises UserError that names the line."""
    lines, encoder = list[PromptLine](), _PromptEncoder(cfg, tokenizer)
    for path in cfg.paths:
        try:
            texts = utf8_text(local_file(path).read_bytes(), f"data.paths={path}").split("\n")
        except OSError as error:
            raise UserError(f"data.paths={path}: cannot be read: {error}") from error
        before = len(lines)
        for number, text in enumerate(texts, start=1):
            if text.strip():
                lines.append(_line(encoder, text, f"{path}, line {number}"))
        if len(lines) == before:
            raise UserError(f"data.paths={path}: has no prompts; {FORMS} in each line")
    return lines


def _line(encoder: "_PromptEncoder", text: str, where: str) -> PromptLine:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not valid JSON ({json_fault(error)}); {FORMS}") from error
    return encoder(row, where)


class _PromptEncoder:
    """Makes prompts of the objects of lines."""

    def __init__(self, cfg: RolloutsConfig, tokenizer: Tokenizer):
        self._cfg, self._tokenizer = cfg, tokenizer
        self._conversation = cache(lambda: Conversation(template_of(cfg), tokenizer))

    def __call__(self, row: Any, where: str) -> PromptLine:
        """The prompt of a line. Raises UserError, which begins with `where`."""
        cfg, content = self._cfg, row.get("prompt") if isinstance(row, dict) else None
        kinds = {type(item) for item in content} if isinstance(content, list) else {type(content)}
        if not content or kinds not in ({str}, {int}, {dict}) or (isinstance(content, list) and kinds == {str}):
            raise UserError(f"{where}: {FORMS}")
        prompt = Prompt(where, content, {"tools": row["tools"]} if "tools" in row else {})
        demand_messages(prompt)
        tokens = encode(prompt, self._tokenizer, self._conversation() if prompt.is_conversation else None)
        if len(tokens) > cfg.prompt_tokens:
            raise UserError(
                f"{where}: the prompt has {len(tokens):,} tokens, data.prompt_tokens is {cfg.prompt_tokens:,}: raise "
                "it, or shorten the prompt"
            )
        return PromptLine(row, tokens)
