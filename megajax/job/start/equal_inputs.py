"""Checks of what a run reads, by `MUST_BE_EQUAL`: the same files on all processes, the same data as when its checkpoint
was written, and the same tokens as other models that it reads.

Processes on several machines may see other files at the same path, such as local copies, of the same size. Every
process reads the same few blocks of every file, so the cost per process does not grow with their number.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megajax.checkpoint.config import WeightsConfig
from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.config.yaml_and_json import read_yaml
from megajax.data.checksum import MODULUS, FileSum, SummedFiles, full_checksums, group_files, sample_checksums
from megajax.data.progress_line import FileProgress
from megajax.data.rows.row_source import files_of, index_files_of
from megajax.data.rows.splits import Splits
from megajax.interop.weights.formats import local_name, split_name
from megajax.interop.weights.origin import run_config
from megajax.processes.gpus import machine_name
from megajax.processes.must_be_equal import MUST_BE_EQUAL, name_processes
from megajax.processes.peers import Peers
from megajax.storage.index_cache import verify
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.tokenizers.tokenizer_files import tokenizer_config

MOVABLE = re.compile(r"data\.(?:(train|valid|test)_)?paths?$")
"""Settings with paths of data files, which may change if the content does not."""

type Sums = dict[str, list[FileSum]]
type Say = Callable[[str], None]


def _quiet(*_: object) -> None:
    pass


class DataFiles:
    """Checksums of the data files of a run's splits.

    Attributes:
        verify: read every byte of each file, and of the cached indices; otherwise samples.
        sums: split -> the checksum of each of its files; empty before `read_sums`.
    """

    def __init__(
        self,
        *,
        verify: bool = False,
        inputs: Sequence[SummedFiles] = (),
        say: Say = _quiet,
        progress: Callable[[], None] = _quiet,
    ):
        """inputs: other files that must be equal on all processes. say: prints a line. progress: called regularly while
        files are read."""
        self.verify, self.sums = verify, dict[str, list[FileSum]]()
        self._inputs = inputs
        self._say, self._progress = say, progress
        self._has_sums = False

    def read_sums(self, splits: Splits) -> Sums:
        """The checksums of the files that the splits read. A collective.

        Raises UserError, also if processes read different files.
        """
        if self._has_sums:
            return self.sums
        files = {name: files_of(source) for name, source in splits._asdict().items()}
        groups = {name: group_files(split_files) for name, split_files in files.items() if split_files}
        unique = list(dict.fromkeys(group for split_groups in groups.values() for group in split_groups))
        demand_equal_files(Peers("inputs"), [*unique, *self._inputs])
        if self.verify:
            self._verify_indices(Peers("indices"), [file for source in splits for file in index_files_of(source)])
        if unique:
            by_group = dict(zip(unique, self._sums(unique), strict=True))
            self.sums = {name: [by_group[group] for group in split_groups] for name, split_groups in groups.items()}
        self._has_sums = True
        return self.sums

    def _verify_indices(self, peers: Peers, files: Sequence[Path]) -> None:
        """Compares cached indices with their checksums, divided over the processes of each host. A collective."""
        machines = peers.gather(machine_name())
        place = machines[: peers.index].count(machines[peers.index])
        own_files = list(dict.fromkeys(files))[place :: machines.count(machines[peers.index])]

        def verify_own() -> None:
            for file in own_files:
                verify(file)
                self._progress()

        peers.check(verify_own)

    def _sums(self, groups: Sequence[SummedFiles]) -> list[FileSum]:
        peers, started = Peers("data"), time.monotonic()
        local_numbers = range(peers.index, len(groups), peers.count)
        local_sums = dict[int, FileSum]()
        peers.check(lambda: local_sums.update(sample_checksums(groups, local_numbers)))
        shares = peers.gather([sample.plain() for sample in local_sums.values()])
        samples = [FileSum(**shares[number % peers.count][number // peers.count]) for number in range(len(groups))]
        if not self.verify:
            return samples
        bar = FileProgress("bytes", f"verifying {sum(sample.files for sample in samples):,} data files")

        def report(bytes_read: int, total: int) -> None:
            self._progress()
            if peers.first:
                bar(bytes_read, bytes_read / total)

        sums = full_checksums(groups, process=peers.index, processes=peers.count, report=report)
        parts = peers.gather([f"{total:x}" for total in sums])
        bar.clear()
        totals = [sum(int(part[number], 16) for part in parts) % MODULUS for number in range(len(groups))]
        took = time.monotonic() - started
        self._say(f"data verified: every byte of {sum(sample.files for sample in samples):,} files, in {took:.0f} s")
        return [replace(sample, whole=f"{total:064x}") for sample, total in zip(samples, totals, strict=True)]

    def plain(self) -> dict[str, list[dict[str, Any]]]:
        """`sums` as JSON values, for a checkpoint."""
        return {name: [file_sum.plain() for file_sum in sums] for name, sums in self.sums.items()}

    def compare(
        self, splits: Splits, stored: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> tuple[dict[str, str], set[str]]:
        """(Differences from the stored checksums: `data: FILE` -> `old -> new`; the splits without differences).

        Where the samples agree, stored checksums of whole files are copied, for the next checkpoint.
        """
        before = {name: [FileSum(**stored_sum) for stored_sum in sums] for name, sums in stored.items()}
        now, changed, unchanged = self.read_sums(splits), dict[str, str](), set[str]()
        for name in [name for name in now if name in before]:
            old_sums, new_sums = before[name], now[name]
            if len(old_sums) != len(new_sums):
                changed[f"data: files of split {name}"] = f"{len(old_sums):,} -> {len(new_sums):,}"
                continue
            pairs = list(zip(new_sums, old_sums, strict=True))
            differences = {f"data: {new.path}": text for new, old in pairs if (text := new.difference(old))}
            changed |= differences
            if not differences:
                unchanged.add(name)
                self.sums[name] = [replace(new, whole=new.whole or old.whole) for new, old in pairs]
        if self.verify and unchanged and all(old.whole is None for name in unchanged for old in before[name]):
            self._say("the last checkpoint has no checksums of whole files for --verify-data; the next one will")
        return changed, unchanged

    def moved(self, name: str, old: object, new: object, unchanged: set[str]) -> bool:
        """Whether setting `name` changed only the paths of its files, not their content or weights."""
        match = MOVABLE.match(name)
        if match is None or not unchanged or (match[1] is not None and match[1] not in unchanged):
            return False
        return _weights(old) == _weights(new)


def _weights(fact: object) -> list[float]:
    """The numbers in a list of weights and paths, as a checkpoint stores it."""
    items, weights = read_yaml(str(fact)), []
    for item in items if isinstance(items, list) else []:
        try:
            weights.append(float(item))
        except (TypeError, ValueError):
            continue
    return weights


BLOCK, BLOCKS, FILES = 4096, 4, 1024
"""Bytes of a block; blocks of a file, spread evenly; maximum number of files of a group that are sampled."""
MAX_DIFFERENCES = 3
"""Maximum number of files that a process reports."""


def input_groups(settings: Mapping[str, Any], sources: Sequence[WeightsConfig]) -> list[SummedFiles]:
    """The files and folders of the tokenizer, the template, and sources of weights in formats of others, each a group.

    settings: of the run, by dotted name. A file that this process does not see makes a group without files.
    """
    texts = [value for name, value in settings.items() if name.startswith("tokenizer.") and isinstance(value, str)]
    template = settings.get("data.template")
    texts += [template] if isinstance(template, str) and "{" not in template else []
    paths = [Path(text).expanduser() for text in texts if "." in text or os.sep in text]
    names = [split_name(source.run) for source in sources]
    paths += [folder for format_name, folder in names if format_name]
    return [_group(path) for path in paths]


def _group(path: Path) -> SummedFiles:
    """A file, or the files of a folder without its subfolders."""
    files = [path] if path.is_file() else sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else []
    return SummedFiles(str(path), tuple(map(str, files)), BLOCKS)


def demand_equal_files(peers: Peers, groups: Sequence[SummedFiles]) -> None:
    """Raises UserError on all processes if one of them sees other files, or cannot read them.

    Objects of a store are left out: process 0 tells the others which generation they read.

    peers: a namespace for this call.
    """
    if peers.count == 1:
        return
    sums: list[FileSum] = []
    local = [[file for file in group.files if store_url(file) is None] for group in groups]
    groups = [replace(group, files=tuple(files)) for group, files in zip(groups, local, strict=True)]
    samples = [replace(group, blocks=BLOCKS, block=BLOCK, sampled=FILES) for group in groups]
    peers.check(lambda: sums.extend(sample_checksums(samples).values()))
    contents = [(s.names * (s.files > 1), s.files, s.bytes, s.sample) for s in sums]
    if peers.equal(hashlib.sha256(repr(contents).encode()).hexdigest()):
        return
    root = [FileSum(**plain) for plain in peers.broadcast([file_sum.plain() for file_sum in sums])]
    reports = peers.gather(_differences(sums, root))
    unequal = {process for process, texts in enumerate(reports) if texts}
    raise UserError(
        MUST_BE_EQUAL["inputs"].message.format(
            processes=f"{name_processes(unequal)} {'reads' if len(unequal) == 1 else 'read'}",
            first=min(unequal),
            differences="; ".join(reports[min(unequal)]),
        )
    )


def _differences(actual: Sequence[FileSum], root: Sequence[FileSum]) -> list[str]:
    """The first differences of a process from process 0, as `file: old -> new`."""
    texts: list[str] = []
    for file_sum, expected in zip_longest(actual, root):
        if file_sum is None or expected is None:
            texts.append(f"number of files and folders: {len(root)} -> {len(actual)}")
            break
        if (text := file_sum.difference(expected)) is not None:
            texts.append(f"{file_sum.path}: {text}")
    more = [f"and {len(texts) - MAX_DIFFERENCES} more"] if len(texts) > MAX_DIFFERENCES else []
    return texts[:MAX_DIFFERENCES] + more


def stored_tokenizer(source: Path) -> Tokenizer | None:
    """The tokenizer of a run or of FORMAT:DIR; None where it is not stored, or its code is not of MegaJAX."""
    try:
        format_name, folder = split_name(local_name(source))
        if format_name:
            config = tokenizer_config([path.name for path in folder.iterdir()], folder, None, folder)
        else:
            config = run_config(source, trusted=False).base.tokenizer
        return None if isinstance(config, NullTokenizerConfig) else config.build()
    except (UserError, OSError):
        return None


def other_token(run_tokenizer: Tokenizer, theirs: Tokenizer) -> int | None:
    """The first id that means different texts in two tokenizers; None: there is none.

    White space around tokens is left out, because decoders differ in it for a single token.
    """
    if run_tokenizer.identity == theirs.identity:
        return None
    shared = range(min(run_tokenizer.vocabulary_size, theirs.vocabulary_size))
    return next(
        (token for token in shared if run_tokenizer.decode([token]).strip() != theirs.decode([token]).strip()), None
    )


def demand_same_tokens(run_tokenizer: Tokenizer, source: Path, whose: str, say: Callable[[str], None]) -> None:
    """Raises UserError, which names a token that differs. Says so where the tokens can't be compared.

    whose: the role of the source's model.
    """
    theirs = stored_tokenizer(source)
    if theirs is None or run_tokenizer.identity.startswith("null:"):
        if split_name(source)[1].exists():  # otherwise loading the weights will tell
            say(f"{whose} {source}: its tokens are not compared with those of the run, because one has no tokenizer")
        return
    if (token := other_token(run_tokenizer, theirs)) is None:
        return
    texts = [f"{tokenizer.decode([token])!r} ({tokenizer.identity})" for tokenizer in (run_tokenizer, theirs)]
    raise UserError(
        MUST_BE_EQUAL["tokens"].message.format(whose=whose, source=source, token=token, run=texts[0], theirs=texts[1])
    )
