"""The config of streamed text."""

from dataclasses import dataclass, field
from typing import ClassVar

from megajax.config.class_references import Builds
from megajax.config.errors import Problem, UserError
from megajax.config.file_paths import PathText, StoredText
from megajax.data.rows.config import LoaderConfig, at_least
from megajax.data.rows.splits import parse_paths
from megajax.data.text.config import text_leaves


@dataclass(frozen=True, kw_only=True, slots=True)
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
    lanes: int = 64
    """Streams that are read side by side, row i from stream i modulo this. A process tokenizes the streams of its rows,
    so with several processes it should be batch.global_size. Another number changes the order of the rows."""
    isolate_documents: bool = False
    """Mask attention between documents of one row and restart positions at each."""
    cache_dir: PathText | None = None
    """Folder for the token counts of chunks, with which a resumed run finds its place without reading what came before,
    and for what is kept of files in object stores; none: the user's cache folder."""
    cache_gib: float = 64.0
    """Size limit of what is kept of files in object stores, GiB on each host."""
    seed: int | None = None
    """Seed for the order of chunks and documents; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)

    def problems(self) -> list[Problem]:
        problems = at_least("lanes", self.lanes, 1) + at_least("cache_gib", self.cache_gib, 0)
        for name in ("paths", "valid_paths", "test_paths"):
            try:
                parse_paths(getattr(self, name) or ("unset",))
            except UserError as error:
                problems.append(Problem(name, str(error)))
        return problems + ([] if self.paths else [Problem("paths", "names no files", "set data.paths=PATTERN")])
