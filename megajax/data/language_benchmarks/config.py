"""Configs of GLUE, RACE and SQuAD, in their published files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from megajax.config.bounds import Count, NotEmpty
from megajax.config.class_references import Builds, resolve
from megajax.config.paths_and_store_urls import PathText
from megajax.data.rows.config import LoaderConfig

VALIDATION, TEST = "validation", "test"
"""Splits, as evaluations name them."""


class GlueFormat(NamedTuple):
    """The .tsv files of a task of GLUE (Wang et al. 2019)."""

    first: str
    """Column of the text, by the header."""
    second: str | None
    """Column of the second text; None: the task has one text."""
    label: str
    """Column of the label, which test files lack."""
    classes: tuple[str, ...]
    """Labels in the order of the model's classes; (): a number."""
    validation: tuple[tuple[str, str], ...] = (("", "dev.tsv"),)
    """Suffix of the file's figures, and the file."""
    test: tuple[tuple[str, str], ...] = (("", "test.tsv"),)
    """The same of the test files."""
    columns: tuple[str, ...] = ()
    """Columns of files with labels, if they have no header."""
    skips: bool = False
    """Skip labelled rows with a wrong number of columns or without a text, as is common practice."""


GLUE: Mapping[str, GlueFormat] = {
    "cola": GlueFormat("sentence", None, "label", ("0", "1"), columns=("source", "label", "mark", "sentence")),
    "sst2": GlueFormat("sentence", None, "label", ("0", "1")),
    "mrpc": GlueFormat("#1 String", "#2 String", "Quality", ("0", "1")),
    "stsb": GlueFormat("sentence1", "sentence2", "score", ()),
    "qqp": GlueFormat("question1", "question2", "is_duplicate", ("0", "1"), skips=True),
    "mnli": GlueFormat(
        "sentence1",
        "sentence2",
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        (("", "dev_matched.tsv"), ("_mismatched", "dev_mismatched.tsv")),
        (("", "test_matched.tsv"), ("_mismatched", "test_mismatched.tsv")),
    ),
    "qnli": GlueFormat("question", "sentence", "label", ("entailment", "not_entailment")),
    "rte": GlueFormat("sentence1", "sentence2", "label", ("entailment", "not_entailment")),
    "wnli": GlueFormat("sentence1", "sentence2", "label", ("0", "1")),
}
"""Task -> its files."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Builds):
    """The common settings of benchmark data. A pass reads every example once, in a different random order."""

    path: Annotated[PathText, NotEmpty("give the folder of the benchmark's files")]
    """The folder of the benchmark, with its files as they are published."""
    seed: int | None = None
    """Seed for the order of the examples; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return dict.fromkeys(("tokens", "segment_ids", "token_types"), "int32") | {"loss_mask": "float32"}

    def folder(self) -> Path:
        """Where the files are."""
        return Path(self.path).expanduser()


@dataclass(frozen=True, kw_only=True)
class GlueConfig(BenchmarkConfig):
    """A task of GLUE: train.tsv, dev.tsv and test.tsv in a folder (of MNLI, dev_matched.tsv and so on).

    Example: `mj.GlueConfig(task="mrpc", path="data/glue/MRPC")`
    """

    target: ClassVar[str] = "megajax.data.language_benchmarks.glue:build_splits"

    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    """Which one."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype; the label of STS-B is a number."""
        return super().leaves() | {"labels": "int32" if GLUE[self.task].classes else "float32"}


@dataclass(frozen=True, kw_only=True)
class RaceConfig(BenchmarkConfig):
    """RACE (Lai et al. 2017): train/, dev/ and test/, each with middle/ and high/, or with the .txt files themselves.

    A row has a sequence for each of the four options: question and option, then the article.

    Example: `mj.RaceConfig(path="data/RACE")`
    """

    target: ClassVar[str] = "megajax.data.language_benchmarks.race:build_splits"

    longest_question: Count = 128
    """Tokens of a question with an option; longer ones are cut, as in Megatron-LM."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return super().leaves() | {"labels": "int32"}


@dataclass(frozen=True, kw_only=True)
class SquadConfig(BenchmarkConfig):
    """SQuAD (Rajpurkar et al. 2016, 2018): train-v1.1.json and dev-v1.1.json, or those of version 2.0, in a folder.

    A paragraph that is too long for a row becomes several windows, each a row.

    Example: `mj.SquadConfig(path="data/squad", version="1.1")`
    """

    target: ClassVar[str] = "megajax.data.language_benchmarks.squad:build_splits"

    version: Literal["1.1", "2.0"] = "2.0"
    """2.0 also has questions without an answer."""
    stride: Count = 128
    """Tokens between the starts of windows of a paragraph."""
    longest_question: Count = 64
    """Tokens of a question; longer ones are cut."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return super().leaves() | {"starts": "int32", "ends": "int32"}


@dataclass(frozen=True, kw_only=True)
class MockGlueConfig(GlueConfig):
    """Synthetic files of a task of GLUE; a letter in the last text indicates the class. Written unless they exist.

    Example: `mj.MockGlueConfig(task="mrpc")`
    """

    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"] = "mnli"
    """Which one."""
    path: PathText = "data/mock_benchmarks"
    """The folder for the folder of the files."""

    def folder(self) -> Path:
        """Where the files are, written unless they are there."""
        return resolve("megajax.data.language_benchmarks.mock:write_glue")(super().folder() / self.task, self.task)


@dataclass(frozen=True, kw_only=True)
class MockRaceConfig(RaceConfig):
    """Synthetic files of RACE; the right options begin with the same letter. Written unless they exist.

    Example: `mj.MockRaceConfig()`
    """

    path: PathText = "data/mock_benchmarks"
    """The folder for the folder of the files."""

    def folder(self) -> Path:
        """Where the files are, written unless they are there."""
        return resolve("megajax.data.language_benchmarks.mock:write_race")(super().folder() / "race")


@dataclass(frozen=True, kw_only=True)
class MockSquadConfig(SquadConfig):
    """Synthetic files of SQuAD; the answers follow the same sign. Written unless they exist.

    Example: `mj.MockSquadConfig(version="1.1")`
    """

    path: PathText = "data/mock_benchmarks"
    """The folder for the folder of the files."""

    def folder(self) -> Path:
        """Where the files are, written unless they are there."""
        return resolve("megajax.data.language_benchmarks.mock:write_squad")(
            super().folder() / f"squad{self.version}", self.version
        )
