"""What can be set about data: where rows come from, how they are cut and masked, how they reach the devices.

Each config says which leaves its rows have (`leaves()`) and builds its row sources:
`cfg.build(tokenizer=, schema=, rows=Rows(...), seed=) -> Splits`; schema: the leaves that the model reads.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem, UserError
from megajax.data.splits import NAMES, Rows, Splits, parse_paths, parse_split

__all__ = [
    "BlendConfig",
    "DataConfig",
    "LoaderConfig",
    "MockConfig",
    "Rows",
    "Splits",
    "StandardLibraryConfig",
]


def _split_problems(split: str) -> list[Problem]:
    try:
        parse_split(split)
    except UserError as error:
        return [Problem("split", str(error))]
    return []


def _between(where: str, value: float, least: float, most: float) -> list[Problem]:
    return [] if least <= value <= most else [Problem(where, f"expected {least:g} to {most:g}, found {value:g}")]


def _at_least(where: str, value: float, least: float) -> list[Problem]:
    return [] if value >= least else [Problem(where, f"expected {least} or more, found {value}")]


def text_leaves(isolated: bool) -> dict[str, str]:
    """The leaves of a row of text, name -> dtype; isolated: documents in a row do not attend to each other."""
    leaves = {"tokens": "int32", "labels": "int32", "loss_mask": "float32", "positions": "int32"}
    return leaves | {"segment_ids": "int32"} if isolated else leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How rows are read ahead of the step that uses them."""

    threads: int = 1
    """Threads that read batches. Token files are memory-mapped: one thread reads the most, more get in its way."""
    prefetch: int = 4
    """Batches read ahead and kept in host memory."""

    def problems(self) -> list[Problem]:
        return _at_least("threads", self.threads, 1) + _at_least("prefetch", self.prefetch, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendConfig(Builds):
    """One token file or a weighted blend of several, cut into rows exactly as Megatron-LM cuts them."""

    target: ClassVar[str] = "megajax.data.blend:build_splits"

    paths: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, all splits from each: "a,b", or with weights "0.3,a,0.7,b"."""
    train_paths: tuple[str, ...] = ()
    """Instead of `paths`: prefixes (with or without weights) for training alone."""
    valid_paths: tuple[str, ...] = ()
    """Instead of `paths`: prefixes for validation alone."""
    test_paths: tuple[str, ...] = ()
    """Instead of `paths`: prefixes for the test set alone."""
    split: str = "969,30,1"
    """Shares of training, validation and test in each of `paths`, by number of sequences; scaled to a sum of 1."""
    cache_dir: str | None = None
    """Folder for index files; none is the user's cache folder. Need not be shared between hosts."""
    reset_positions: bool = False
    """Positions start again at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend past the end-of-document token before them."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    isolate_documents: bool = False
    """Documents in one row do not attend to each other and have positions of their own; by the borders of the
    stored sequences, whether or not they end in an end-of-document token."""
    extra_token: bool = True
    """Read one token more than a row holds, so that the last label is known too."""
    drop_last: bool = True
    """Drop the incomplete last row of the validation set; otherwise it is padded. Other splits always drop it."""
    surplus: float = 0.005
    """Share of rows built in each dataset of a blend beyond those its weight asks for."""
    seed: int | None = None
    """Seed of document and row order; none is the seed of the run."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Reading ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents or self.reset_attention_mask)

    def problems(self) -> list[Problem]:
        found = _split_problems(self.split) + _at_least("surplus", self.surplus, 0)
        lists = {f"{name}_paths": getattr(self, f"{name}_paths") for name in NAMES}
        given = [name for name, items in lists.items() if items]
        if self.paths and given:
            found.append(Problem("paths", f"set together with {', '.join(given)}", "use one of the two ways"))
        if not self.paths and not given:
            found.append(Problem("paths", "no data path given", "set data.paths=PREFIX (without .bin and .idx)"))
        for name, items in {"paths": self.paths, **lists}.items():
            try:
                parse_paths(items or ("unset",))
            except UserError as error:
                found.append(Problem(name, str(error)))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class MockConfig(Builds):
    """Made-up documents 1, 2, 3, … for tests of speed: 100,000 of random length, a third for each split."""

    target: ClassVar[str] = "megajax.data.mock:build_splits"

    isolate_documents: bool = False
    """Documents in one row do not attend to each other and have positions of their own."""
    seed: int | None = None
    """Seed of document and row order; none is the seed of the run."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Reading ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardLibraryConfig(Builds):
    """Real text that every Python brings along: the source files of its standard library, for the byte tokenizer."""

    target: ClassVar[str] = "megajax.data.standard_library:build_splits"

    megabytes: float = 8.0
    """Text to take, in 10^6 bytes; whole files, one document each, until the limit is reached."""
    split: str = "90,9,1"
    """Shares of training, validation and test, by number of files."""
    cache_dir: str | None = None
    """Folder for the token file and its index; none is the user's cache folder."""
    isolate_documents: bool = False
    """Files in one row do not attend to each other and have positions of their own."""
    seed: int | None = None
    """Seed of the choice of files and of row order; none is the seed of the run."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Reading ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return text_leaves(self.isolate_documents)

    def problems(self) -> list[Problem]:
        return _split_problems(self.split) + _between("megabytes", self.megabytes, 0.01, 1e6)


DataConfig = BlendConfig | MockConfig | StandardLibraryConfig
