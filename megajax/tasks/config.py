"""Settings of the tasks that a model is evaluated on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from megajax.config.bounds import Bounds, Count, Index, NotEmpty
from megajax.config.class_references import Builds, resolve
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText, StoredText, store_url
from megajax.training.run_config import RunConfig

type File = Annotated[StoredText, NotEmpty()]
type Stride = Annotated[int, Bounds(at_least=1, hint="none: windows that do not overlap")]


class LanguageTask(Builds):
    """Base of the tasks of causal language models."""

    def build(self, scorer: Any) -> Any:
        """Raises UserError for other kinds of models, and for missing data."""
        resolve("megajax.training.scorer:demand_scores")(scorer.program)
        return super().build(scorer)

    def problems(self) -> list[Problem]:
        """Files that do not exist. Token files are checked when they are opened."""
        path = getattr(self, "path", None)
        if path is not None and store_url(path) is None and not Path(path).expanduser().is_file():
            hint = "nothing is downloaded: give a local file, or s3://BUCKET/FILE or gs://BUCKET/FILE"
            return [Problem("path", f"{path} does not exist", hint)]
        return []


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(LanguageTask):
    """Loss and perplexity of token files, read as one stream of tokens.

    Example: `mj.PerplexityConfig(paths=("data/valid_text_document",), stride=512)`
    """

    target: ClassVar[str] = "megajax.tasks.perplexity:TokenFiles"
    paths: Annotated[tuple[File, ...], NotEmpty()]
    """Prefixes of .bin and .idx files."""
    stride: Stride | None = None
    """Tokens between the starts of windows. Each token is scored once, given the tokens before it in the window that
    ends at most `stride` tokens later. None: the length of a row, windows that do not overlap."""
    name: str = "perplexity"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(LanguageTask):
    """Perplexity of raw text per token, word and byte. Every document is scored after a beginning-of-sequence token, or
    an end-of-document token if the vocabulary has no such token.

    Example: `mj.TextConfig(path="data/book.txt", stride=512)`
    """

    target: ClassVar[str] = "megajax.tasks.perplexity:TextPerplexity"
    path: File
    """A text file (one document), or a .jsonl file with one document in `key` of each line."""
    key: str = "text"
    """Key of a document in a .jsonl file."""
    stride: Stride | None = None
    """Tokens between the starts of windows; none: the length of a row."""
    name: str = "text"
    """Under which the figures are reported."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.key != "text" and not self.has_lines():
            problems.append(Problem("key", f"is {self.key}, but {self.path} is not a .jsonl file", "leave it out"))
        return problems

    def has_lines(self) -> bool:
        """Whether each line of the file is a JSON object with a document."""
        return self.path.endswith((".jsonl", ".ndjson"))


@dataclass(frozen=True, kw_only=True)
class WikitextConfig(LanguageTask):
    """Perplexity of a word-tokenised text per original word: the task WIKITEXT103 of Megatron-LM.

    Example: `mj.WikitextConfig(path="data/wiki.test.tokens")`
    """

    target: ClassVar[str] = "megajax.tasks.perplexity:Wikitext"
    path: File
    """The text, such as wiki.test.tokens."""
    stride: Stride | None = 32
    """Tokens between the starts of windows, Megatron-LM's --overlapping-eval. None: the length of a row."""
    detokenizer: Literal["wikitext", "ptb", "none"] = "wikitext"
    """Rules that remove the spaces between words and punctuation; ptb: of the Penn Treebank."""
    name: str = "wikitext"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class LambadaConfig(LanguageTask):
    """Prediction of the last word of a text: the task LAMBADA of Megatron-LM.

    Example: `mj.LambadaConfig(path="data/lambada_test.jsonl")`
    """

    target: ClassVar[str] = "megajax.tasks.loglikelihood:Lambada"
    path: File
    """A .jsonl file with `text` in each line."""
    strict: bool = False
    """Whether to score the whole last word, with all its tokens, instead of the last token of the text."""
    name: str = "lambada"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class ChoicesConfig(LanguageTask):
    """Multiple choice by log-likelihood.

    Example: `mj.ChoicesConfig(path="data/questions.jsonl")`
    """

    target: ClassVar[str] = "megajax.tasks.loglikelihood:Choices"
    path: File
    """A .jsonl file with `context`, `choices` and `answer`, the index of the correct choice from 0, in each line."""
    delimiter: str = " "
    """Text between the context and a choice."""
    name: str = "choices"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class SplitConfig(LanguageTask):
    """Loss on all rows of a split of the run's data, as with evaluation.full.

    Example: `mj.SplitConfig(split="test")`
    """

    target: ClassVar[str] = "megajax.tasks.perplexity:Split"
    split: Literal["validation", "test"] = "validation"
    """Which split."""
    name: str = "split"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(LanguageTask):
    """Tasks of lm-evaluation-harness on local data (extra eval).

    Example: `mj.HarnessConfig(tasks=("arc_easy",), fewshot=5)`
    """

    target: ClassVar[str] = "megajax.tasks.harness:Harness"
    tasks: Annotated[tuple[str, ...], NotEmpty("name a task of lm-eval")]
    """Names of tasks, groups or tags."""
    include_path: PathText | None = None
    """A folder with YAML files of tasks, which take precedence over those of lm-eval."""
    fewshot: Index | None = None
    """Examples before each question. None: the task's default."""
    limit: Count | None = None
    """Maximum documents of each task. None: no limit."""
    generated: Count = 256
    """Maximum tokens of a generated answer, if the task does not set it."""
    name: str = "lm_eval"
    """Under which the figures are reported."""

    def needed_packages(self) -> dict[str, str]:
        """See Builds."""
        return {"": "lm_eval"}

    def code(self) -> dict[str, str]:
        """YAML files of tasks name functions of Python files beside them."""
        return {} if self.include_path is None else {"include_path": self.include_path}


@dataclass(frozen=True, kw_only=True)
class BenchmarkTaskConfig(Builds):
    """Base of benchmark tasks: figures on a split of the run's data, and a file of predictions.

    The files are in predictions/SPLIT of the run's folder or --output.
    """

    split: Literal["validation", "test"] = "validation"
    """Which split."""
    name: str
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class GlueTaskConfig(BenchmarkTaskConfig):
    """The metrics of the run's GLUE task, and predictions in the format of GLUE's server.

    Example: `mj.EvaluationConfig(tasks=(mj.GlueTaskConfig(),), tasks_every=500)`
    """

    target: ClassVar[str] = "megajax.tasks.benchmarks:Glue"
    name: str = "glue"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class RaceTaskConfig(BenchmarkTaskConfig):
    """The accuracy on RACE, on all questions and on those of middle and high schools.

    Example: `mj.EvaluationConfig(tasks=(mj.RaceTaskConfig(),), tasks_every=500)`
    """

    target: ClassVar[str] = "megajax.tasks.benchmarks:Race"
    name: str = "race"
    """Under which the figures are reported."""


@dataclass(frozen=True, kw_only=True)
class SquadTaskConfig(BenchmarkTaskConfig):
    """Exact match and F1 on SQuAD in percent, as in the official evaluation, and the files that it reads.

    Example: `mj.EvaluationConfig(tasks=(mj.SquadTaskConfig(),), tasks_every=1000)`
    """

    target: ClassVar[str] = "megajax.tasks.squad:Squad"
    name: str = "squad"
    """Under which the figures are reported."""
    longest_answer: Count = 30
    """Maximum tokens of an answer."""
    best: Count = 20
    """Number of most likely first and last tokens to combine, and of answers per question in nbest_predictions.json."""
    threshold: float = 0.0
    """In version 2.0, no answer is given if its score exceeds that of the best answer by more than this."""

    def problems(self) -> list[Problem]:
        message = "must be validation: the questions of the test split are not public"
        return [Problem("split", message, "use validation")] if self.split == "test" else []


KINDS: Mapping[str, tuple[type, str]] = {
    str(config.__dataclass_fields__["name"].default).replace("_", "-"): (config, setting)
    for config, setting in (
        (PerplexityConfig, "paths"),
        (TextConfig, "path"),
        (WikitextConfig, "path"),
        (LambadaConfig, "path"),
        (ChoicesConfig, "path"),
        (SplitConfig, "split"),
        (GlueTaskConfig, "split"),
        (RaceTaskConfig, "split"),
        (SquadTaskConfig, "split"),
        (HarnessConfig, "tasks"),
    )
}
"""Name on the command line, which is the default of `name` -> config, and the setting that follows the name."""

TRAINING_ONLY = ("batch", "checkpoint", "evaluation", "optimizer", "profile", "schedule", "steps")
"""Parts of a run's config that an evaluation does not use."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedConfig(RunConfig):
    """The config of a run for evaluation, possibly on other devices than in training."""

    def problems(self, devices: int | None = None) -> list[Problem]:
        """The problems of training, except for settings that only training uses, such as the batch size."""
        problems = super().problems(devices)
        parts = (*TRAINING_ONLY, "parallel.virtual_stages")
        return [p for p in problems if not any(p.setting == part or p.setting.startswith(f"{part}.") for part in parts)]
