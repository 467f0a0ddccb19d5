"""The common part of data configs: their interface, reading ahead, and token files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

from megajax.batch import Schema
from megajax.config.bounds import Count, Index, NotNegative
from megajax.config.class_references import Builds
from megajax.config.errors import Problem, UserError
from megajax.config.paths_and_store_urls import PathText, StoredText
from megajax.data.rows.splits import NAMES, Rows, Splits, parse_paths, parse_split


@dataclass(frozen=True)
class Readable:
    """The rule of texts that a function must be able to read. It reports the UserError of the function."""

    read: Callable[[Any], object]
    """Raises UserError for a text that it cannot read."""
    hint: str = ""
    """What to write instead."""

    def words(self) -> str:
        """Nothing: the text of the setting says what is read."""
        return ""

    def error(self, value: object) -> str:
        """The message of the error."""
        try:
            self.read(value)
        except UserError as error:
            return str(error)
        return ""


type Split = Annotated[str, Readable(parse_split)]
"""Shares of training, validation and test, such as "969,30,1"."""


def paths_problems(config: Any, files: str, hint: str) -> list[Problem]:
    """Both common and separate files for splits, or none at all. files: their kind, for the message."""
    separate = [f"{name}_paths" for name in NAMES if getattr(config, f"{name}_paths")]
    if config.paths and separate:
        return [Problem("paths", f"is set together with {', '.join(separate)}", "use one of the two ways")]
    return [] if config.paths or separate else [Problem("paths", f"names no {files}", hint)]


class RowsConfig(Protocol):
    """The interface of a data config."""

    loader: "LoaderConfig"
    """A field of the config."""

    def leaves(self) -> Mapping[str, str]:
        """The leaves of a row, name -> dtype."""
        ...

    def build(self, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
        """Row sources (`len`, `[i]` -> mapping of arrays) for training, validation and test; pure functions of i.

        If a source has a method `files()`, the paths of the files that it reads, a resumed run checks their content.

        schema: the leaves that the model reads; rows: number of rows of each split that the run reads.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CyclicConfig(Builds):
    """Rows in a different random order in each pass over the data, as in Megatron-LM's cyclic data loader.

    The order depends on the number of data shards and on the rows of a microbatch.

    Example: `mj.LoaderConfig(cyclic=mj.CyclicConfig())`
    """

    target: ClassVar[str] = "megajax.data.rows.cyclic:CyclicRows"

    buckets: bool = True
    """Each data shard shuffles its own part of the rows; false: all rows are shuffled together."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Order of rows, and reading ahead of the step that uses them.

    Example: `mj.LoaderConfig(threads=8)`
    """

    threads: Count = 1
    """Threads that read batches. One is fastest for token files: more threads compete for Python's lock."""
    prefetch: Count = 4
    """Batches read ahead and kept in host memory."""
    retries: Index = 6
    """Retries of a row when the disk or file server fails, the first after a quarter of a second, each further one
    after twice the time."""
    cyclic: CyclicConfig | None = None
    """Read rows in a different random order in each pass, for as many passes as the run needs; none: in the order of
    the data, which may already be random."""

    balance: Literal["none", "microbatch", "step"] = "none"
    """Assign the rows of a training step to data groups so that attention has about equal work in each. microbatch:
    rows stay in their microbatch. step: rows of similar work also share a microbatch. The rows of a step and the losses
    stay the same."""


@dataclass(frozen=True, kw_only=True)
class TokenFilesConfig(Builds):
    """A token file or a weighted blend of several, and their splits."""

    paths: tuple[StoredText, ...] = ()
    """Prefixes of .bin/.idx pairs, each split into train, validation and test: "a,b", or with weights "0.3,a,0.7,b".
    Also in an object store: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, read by ranges as they are needed."""
    train_paths: tuple[StoredText, ...] = ()
    """Prefixes, with or without weights, of training data only, instead of `paths`."""
    valid_paths: tuple[StoredText, ...] = ()
    """Prefixes, with or without weights, of validation data only."""
    test_paths: tuple[StoredText, ...] = ()
    """Prefixes, with or without weights, of test data only."""
    split: Split = "969,30,1"
    """Shares of training, validation and test in each of `paths`, by number of sequences, or by number of documents for
    masked data; scaled to a sum of 1."""
    cache_dir: PathText | None = None
    """Folder for index files, and for what was read from object stores; none: the user's cache folder. It need not be
    shared between hosts."""
    cache_gib: NotNegative = 64.0
    """Size limit of what is kept of token files in object stores, GiB on each host."""
    prefetch: bool = False
    """Read token files in object stores whole, into what is kept, before the first step; a run that is stopped
    meanwhile goes on where it was."""
    surplus: NotNegative = 0.005
    """Additional share of rows built for each dataset of a blend, beyond what its weight needs."""
    seed: int | None = None
    """Seed for the order of documents and rows; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def token_files(self, path: str) -> tuple[str, ...]:
        """The prefixes of the token files of a path."""
        return (path,)

    def preprocess_flags(self) -> tuple[str, ...]:
        """The flags of `megajax.preprocess` that write these files; none: their names say it."""
        return ()

    def problems(self) -> list[Problem]:
        problems = paths_problems(self, "data path", "set data.paths=PREFIX (without .bin and .idx)")
        for name in ("paths", *(f"{split}_paths" for split in NAMES)):
            try:
                parse_paths(getattr(self, name) or ("unset",))
            except UserError as error:
                problems.append(Problem(name, str(error)))
        return problems
