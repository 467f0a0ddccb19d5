"""Checks that all processes of a run read the same data, tokenizer and initial weights, by a small sample of each file.

Processes on several machines may see other files at the same path, such as local copies, of the same size. Every
process reads the same few blocks of every file, so the cost per process does not grow with their number.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megajax.checkpoint.config import WeightsConfig
from megajax.config.errors import UserError
from megajax.config.file_paths import store_url
from megajax.data.checksum import FileSum, Group, sample_checksums
from megajax.interop.formats import split_name
from megajax.mesh.processes.peers import Peers
from megajax.mesh.processes.rendezvous_process_zero import name_processes

BLOCK, BLOCKS, FILES = 4096, 4, 1024
"""Bytes of a block; blocks of a file, spread evenly; maximum number of files of a group that are sampled."""
MAX_DIFFERENCES = 3
"""Maximum number of files that a process reports."""


def input_groups(settings: Mapping[str, Any], sources: Sequence[WeightsConfig]) -> list[Group]:
    """The files and folders of the tokenizer, and of sources of weights in formats of others, each as a group.

    settings: of the run, by dotted name. A file that this process does not see makes a group without files.
    """
    texts = [value for name, value in settings.items() if name.startswith("tokenizer.") and isinstance(value, str)]
    paths = [Path(text).expanduser() for text in texts if "." in text or os.sep in text]
    names = [split_name(source.run) for source in sources]
    paths += [folder for format_name, folder in names if format_name]
    return [_group(path) for path in paths]


def _group(path: Path) -> Group:
    """A file, or the files of a folder without its subfolders."""
    files = [path] if path.is_file() else sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else []
    return Group(str(path), tuple(map(str, files)), BLOCKS)


def demand_equal_files(peers: Peers, groups: Sequence[Group]) -> None:
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
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()
    if peers.agree(None if peers.broadcast(digest) == digest else "differs") is None:
        return
    root = [FileSum(**plain) for plain in peers.broadcast([file_sum.plain() for file_sum in sums])]
    reports = peers.gather(_differences(sums, root))
    unequal = {process for process, differences in enumerate(reports) if differences}
    first, verb = min(unequal), "reads" if len(unequal) == 1 else "read"
    raise UserError(
        f"{name_processes(unequal)} {verb} other files than process 0. From process 0 to process {first}: "
        f"{'; '.join(reports[first])}. All processes need the same data, tokenizer and initial weights"
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
