"""Configs of text for language models."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from megajax.config.bounds import Bounds, Count, NotNegative, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem, UserError
from megajax.config.paths_and_store_urls import PathText, StoredText
from megajax.data.rows.config import LoaderConfig, Split, TokenFilesConfig
from megajax.data.rows.splits import parse_paths

type Megabytes = Annotated[float, Bounds(at_least=0.01, at_most=1e6)]


def text_leaves(isolated: bool) -> dict[str, str]:
    """The leaves of a row of text, name -> dtype. isolated: documents in a row do not attend to each other."""
    leaves = {"tokens": "int32", "labels": "int32", "loss_mask": "float32", "positions": "int32", "padding": "bool"}
    return leaves | {"segment_ids": "int32"} if isolated else leaves


@dataclass(frozen=True, kw_only=True)
class BlendConfig(TokenFilesConfig):
    """A token file or a weighted blend of several, cut into the same rows as in Megatron-LM.

    Example: `mj.BlendConfig(paths=("0.3", "data/web", "0.7", "data/code"), split="969,30,1")`
    """

    target: ClassVar[str] = "megajax.data.text.gpt:build_splits"

    reset_positions: bool = False
    """Restart positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend beyond the previous end-of-document token."""
    eod_mask_loss: bool = False
    """Mask the loss where the input is the end-of-document token."""
    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each. Documents are the stored sequences,
    with or without an end-of-document token."""
    extra_token: bool = True
    """Read one token more than a row has, as the label of the last token."""
    drop_last: bool = True
    """Drop the incomplete last row of the validation split; false pads it. Other splits always drop it."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents or self.reset_attention_mask)


@dataclass(frozen=True, kw_only=True)
class MockConfig(Builds):
    """Synthetic documents with the tokens 1, 2, 3, …, to measure speed: of random length, a third per split.

    Example: `mj.MockConfig(isolate_documents=True)`
    """

    target: ClassVar[str] = "megajax.data.text.gpt:build_mock_splits"

    documents: Annotated[int, Bounds(at_least=3)] | None = None
    """How many documents there are, of 2048 tokens on average; none: 100,000, as in Megatron-LM. Fewer have a smaller
    index, and rows in another order."""
    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each."""
    seed: int | None = None
    """Seed for the order of documents and rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)


@dataclass(frozen=True, kw_only=True)
class StandardLibraryConfig(Builds):
    """The source files of Python's standard library as text, for the byte tokenizer. Needs no download.

    Example: `mj.StandardLibraryConfig(megabytes=8)`
    """

    target: ClassVar[str] = "megajax.data.standard_library:build_splits"

    megabytes: Megabytes = 8.0
    """Size of the text in 10^6 bytes: whole files, one document each, up to this limit."""
    split: Split = "90,9,1"
    """Shares of training, validation and test, by number of files."""
    cache_dir: PathText | None = None
    """Folder for the token file and its index; none: the user's cache folder."""
    isolate_documents: bool = False
    """Mask attention between files of one row and restart positions at each."""
    seed: int | None = None
    """Seed for the choice of files and the order of rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)


@dataclass(frozen=True, kw_only=True)
class FillInMiddleConfig(BlendConfig):
    """Token files with some documents reordered, so that a model learns to fill in the middle (FIM; Bavarian et al.
    2022).

    Example: `mj.FillInMiddleConfig(paths=("data/code",), rate=0.5)`
    """

    target: ClassVar[str] = "megajax.data.text.fim:build_splits"

    rate: Share = 0.5
    """Share of the documents that are reordered."""
    spm_rate: Share = 0.5
    """Share of those with the suffix before the prefix (SPM); the others have prefix, suffix, middle (PSM)."""
    prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    middle_token: str = "<fim_middle>"
    """Token before the middle."""
    suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fragment_token: str | None = None
    """Token at which documents are cut into fragments that are reordered one by one, such as the files of a repository;
    none: documents are reordered as a whole."""
    fragment_rate: Share = 0.5
    """Share of the fragments that are reordered, within a reordered document."""
    unchanged_prefix: str | None = None
    """Documents and fragments that begin with this text are not reordered."""
    sequential_draws: bool = False
    """Draw from a single generator for all rows, in the order 0, 1, 2, …, as Megatron-LM does; a resumed run replays
    all earlier rows. False: each row has its own generator."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.isolate_documents:
            problem = "needs the borders of the stored documents, which reordering moves"
            hint = "use reset_attention_mask and reset_positions, which go by end-of-document tokens"
            problems.append(Problem("isolate_documents", problem, hint))
        return problems


@dataclass(frozen=True, kw_only=True)
class StreamConfig(Builds):
    """Text files as they are, tokenized while the run reads them: Parquet, Arrow, WebDataset, ArrayRecord, JSON lines.

    Each row is a pure function of its number, so a run resumes at the exact row on any number of processes.

    Example: `mj.StreamConfig(paths=("0.3", "data/web/*.parquet", "0.7", "data/code/*.jsonl.zst"))`
    """

    target: ClassVar[str] = "megajax.data.streams.rows:build_splits"

    paths: tuple[StoredText, ...]
    """Patterns of training files with *, each a part of the mixture: "a/*.parquet,b/*.tar", or with weights
    "0.3,a/*.parquet,0.7,b/*.tar". Also in an object store: s3://BUCKET/FOLDER/*.parquet, or gs://."""
    valid_paths: tuple[StoredText, ...] = ()
    """Patterns of validation files, in the same form."""
    test_paths: tuple[StoredText, ...] = ()
    """Patterns of test files, in the same form."""
    text: str = "text"
    """Column or JSON key of a document's text; in tar files, also the suffix .txt of a file that is one. Empty: a
    record of ArrayRecord is the text."""
    shuffle: bool = True
    """Read the chunks of files, and the documents of a chunk, in a different random order in each pass."""
    lanes: Count = 64
    """Streams that are read side by side, row i from stream i modulo this. A process tokenizes the streams of its rows,
    so with several processes it should be batch.global_size. Another number changes the order of the rows."""
    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each."""
    cache_dir: PathText | None = None
    """Folder for the token counts of chunks, with which a resumed run finds its place without reading what came before,
    and for what is kept of files in object stores; none: the user's cache folder."""
    cache_gib: NotNegative = 64.0
    """Size limit of what is kept of files in object stores, GiB on each host."""
    seed: int | None = None
    """Seed for the order of chunks and documents; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)

    def problems(self) -> list[Problem]:
        problems = []
        for name in ("paths", "valid_paths", "test_paths"):
            try:
                parse_paths(getattr(self, name) or ("unset",))
            except UserError as error:
                problems.append(Problem(name, str(error)))
        return problems + ([] if self.paths else [Problem("paths", "names no files", "set data.paths=PATTERN")])
