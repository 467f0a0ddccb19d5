"""The config of conversations."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megajax.config.bounds import Bounds, Count
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText, StoredText
from megajax.data.rows.config import LoaderConfig, Split, paths_problems
from megajax.data.text.config import text_leaves


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Builds):
    """Conversations for supervised fine-tuning (SFT), packed into rows.

    Files of JSON lines, each {"messages": [{"role": "user", "content": "…"}, …]} or
    {"conversations": [{"from": "human", "value": "…"}, …]}. Conversations of one row do not attend to each other.

    Example: `mj.ChatConfig(paths=("data/chats.jsonl",), split="98,2,0")`
    """

    target: ClassVar[str] = "megajax.data.chat.rows:build_splits"
    has_messages: ClassVar[bool] = True

    paths: tuple[StoredText, ...] = ()
    """Files of JSON lines (.gz and .zst too), split into training, validation and test together."""
    train_paths: tuple[StoredText, ...] = ()
    """Files of training data only, instead of `paths`."""
    valid_paths: tuple[StoredText, ...] = ()
    """Files of validation data only."""
    test_paths: tuple[StoredText, ...] = ()
    """Files of test data only."""
    split: Split = "969,30,1"
    """Shares of training, validation and test in `paths`, by number of lines; scaled to a sum of 1."""
    template: PathText | None = None
    """Renders conversations as text: a Jinja2 template, a file with one (also a tokenizer_config.json), a model's
    folder, or a name: plain, chatml, identity, nemotron-h-aligned, nemotron-nano-v2. none: the template in the folder
    of the run's tokenizer, or plain if it has none."""
    end_token: Literal["append", "template"] = "append"
    """append: a conversation ends with the end-of-document token, which is added unless the template ends with it.
    template: only what the template renders, as in Megatron-LM."""
    loss: Literal["answers", "all"] = "answers"
    """Tokens with a loss: of the assistant's messages, or all."""
    special_tokens: Literal["text", "tokens"] | None = None
    """What names of special tokens within messages are: ordinary text, as for the server, or these tokens. none: text,
    but tokens with end_token=template, as in Megatron-LM."""
    learn_next_marker: bool | None = None
    """Where the template writes no token that ends an answer, and the next message begins with one, as GLM's <|user|>:
    learn that token. Tokens that end answers are those of generation_config.json beside the tokenizer, and its
    end-of-document token. none: yes, but not with end_token=template."""
    packing: Literal["best_fit", "balanced", "lines"] = "best_fit"
    """best_fit: rows of several lines with little padding, in a different order in each epoch. balanced: the same, with
    about equal attention work on each row, as far as single long lines allow. lines: a row for each line, in the order
    of the files; a system message within a line begins another conversation, as in Megatron-LM."""
    isolate_padding: bool = True
    """Divide the padding after the last conversation into short documents, which cost attention little. False: it
    belongs to the last conversation, as in Megatron-LM."""
    cut_long: bool = False
    """Cut a line that is longer than a row; false: an invalid line, see `on_error`."""
    pad_multiple: Count = 1
    """Pad each conversation to a multiple of this many tokens."""
    pad_token: str | None = None
    """Token for padding; none: the tokenizer's pad token, or else its end-of-document token."""
    mask_pad: bool = False
    """No loss wherever the label is the pad token, as in Megatron-LM. If the pad token also ends conversations, the
    model does not learn to end them."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with an invalid line: stop, or skip and count it."""
    cache_dir: PathText | None = None
    """Folder for tokenized conversations; none: the user's cache folder."""
    seed: int | None = None
    """Seed for the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(isolated=True)

    def needed_packages(self) -> dict[str, str]:
        """See Builds."""
        return {"": "jinja2"}

    def problems(self) -> list[Problem]:
        return paths_problems(self, "file", "set data.paths=FILE.jsonl")


def preference_leaves(answers: str) -> dict[str, str]:
    """The leaves of a row of pairs, judged answers or choices, name -> dtype."""
    if answers == "choices":
        return dict.fromkeys(("tokens", "segment_ids", "labels"), "int32")
    return {**text_leaves(isolated=True), answers: "int32", "reference": "float32"}


@dataclass(frozen=True, kw_only=True)
class PreferencesConfig(Builds):
    """Answers that were preferred to others, or judged good or bad, packed into rows.

    Files of JSON lines, each {"prompt": …, "chosen": …, "rejected": …}, or with answers=judged {"prompt": …,
    "completion": …, "label": true}. Prompts and answers are texts, or lists of messages as in ChatConfig; without a
    prompt, chosen and rejected are two conversations that begin alike. Answers of one row do not attend to each other.

    Example: `mj.PreferencesConfig(paths=("data/preferences.jsonl",), split="98,2,0")`
    """

    target: ClassVar[str] = "megajax.data.chat.preferences:build_splits"
    has_messages: ClassVar[bool] = True
    loss: ClassVar[Literal["answers"]] = "answers"
    cut_long: ClassVar[bool] = False
    mask_pad: ClassVar[bool] = False
    pad_multiple: ClassVar[int] = 1
    isolate_padding: ClassVar[bool] = True
    learn_next_marker: ClassVar[None] = None

    paths: tuple[StoredText, ...] = ()
    """Files of JSON lines (.gz and .zst too), split into training, validation and test together."""
    train_paths: tuple[StoredText, ...] = ()
    """Files of training data only, instead of `paths`."""
    valid_paths: tuple[StoredText, ...] = ()
    """Files of validation data only."""
    test_paths: tuple[StoredText, ...] = ()
    """Files of test data only."""
    split: Split = "969,30,1"
    """Shares of training, validation and test in `paths`, by number of lines; scaled to a sum of 1."""
    answers: Literal["pairs", "judged", "choices"] = "pairs"
    """pairs: each line has a chosen and a rejected answer, for DPO, ORPO and SimPO. judged: single answers that are
    good or bad, for KTO; a line with a pair counts as two. choices: a row for each pair, of two sequences with the
    chosen one first, for a reward model with ChoiceHeadConfig(choices=2)."""
    template: PathText | None = None
    """Renders messages as text, as in ChatConfig."""
    end_token: Literal["append", "template"] = "append"
    """append: an answer ends with the end-of-document token, which is added unless the template ends with it. template:
    only what the template renders."""
    special_tokens: Literal["text", "tokens"] | None = None
    """What names of special tokens within messages are, as in ChatConfig."""
    packing: Literal["best_fit", "balanced", "lines"] = "best_fit"
    """best_fit: rows of several lines with little padding, in a different order in each epoch. balanced: the same, with
    about equal attention work on each row. lines: a row for each line, in the order of the files."""
    pad_token: str | None = None
    """Token for padding; none: the tokenizer's pad token, or else its end-of-document token."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with an invalid line, such as a pair without a rejected answer, with equal answers, or longer than a
    row: stop, or skip and count it."""
    reference_dir: PathText | None = None
    """Folder for the log-probabilities of the reference model, which all hosts see; none: the folder `reference` beside
    the first file."""
    cache_dir: PathText | None = None
    """Folder for tokenized answers; none: the user's cache folder."""
    seed: int | None = None
    """Seed for the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return preference_leaves(self.answers)

    def problems(self) -> list[Problem]:
        problems = paths_problems(self, "file", "set data.paths=FILE.jsonl")
        if self.answers == "choices" and self.packing != "best_fit":
            problems.append(
                Problem("packing", "has no effect on choices, which have rows of their own", "leave it out")
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class MockPreferencesConfig(Builds):
    """Synthetic preferences for the byte tokenizer: of two orders of the digits of a number, the ascending one.

    Example: `mj.MockPreferencesConfig(lines=4000)`
    """

    target: ClassVar[str] = "megajax.data.chat.preferences:build_mock_splits"

    lines: Annotated[int, Bounds(at_least=2)] = 4000
    """Number of pairs, or of judged answers."""
    answers: Literal["pairs", "judged", "choices"] = "pairs"
    """Kind of lines, as in PreferencesConfig."""
    split: Split = "90,10,0"
    """Shares of training, validation and test, by number of lines."""
    reference_dir: PathText | None = None
    """Folder for the log-probabilities of the reference model, as in PreferencesConfig."""
    cache_dir: PathText | None = None
    """Folder for the file of preferences and its tokens; none: the user's cache folder."""
    seed: int | None = None
    """Seed for the preferences and the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return preference_leaves(self.answers)
