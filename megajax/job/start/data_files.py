"""Checks that the data files of a run have the same content as when its checkpoint was written."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.config.yaml_and_json import read_yaml
from megajax.data.checksum import MODULUS, FileSum, Group, full_checksums, group_files, sample_checksums
from megajax.data.progress_line import Progress
from megajax.data.rows.row_source import files_of, index_files_of
from megajax.data.rows.splits import Splits
from megajax.job.start.equal_files import demand_equal_files
from megajax.mesh.processes.gpus import machine_name
from megajax.mesh.processes.peers import Peers
from megajax.storage.index_cache import verify

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
        inputs: Sequence[Group] = (),
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

    def _sums(self, groups: Sequence[Group]) -> list[FileSum]:
        peers, started = Peers("data"), time.monotonic()
        local_numbers = range(peers.index, len(groups), peers.count)
        local_sums = dict[int, FileSum]()
        peers.check(lambda: local_sums.update(sample_checksums(groups, local_numbers)))
        shares = peers.gather([sample.plain() for sample in local_sums.values()])
        samples = [FileSum(**shares[number % peers.count][number // peers.count]) for number in range(len(groups))]
        if not self.verify:
            return samples
        bar = Progress("bytes", f"verifying {sum(sample.files for sample in samples):,} data files")

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

    def moved(self, name: str, old: Any, new: Any, unchanged: set[str]) -> bool:
        """Whether setting `name` changed only the paths of its files, not their content or weights."""
        match = MOVABLE.match(name)
        if match is None or not unchanged or (match[1] is not None and match[1] not in unchanged):
            return False
        return _weights(old) == _weights(new)


def _weights(fact: Any) -> list[float]:
    """The numbers in a list of weights and paths, as a checkpoint stores it."""
    items, weights = read_yaml(str(fact)), []
    for item in items if isinstance(items, list) else []:
        try:
            weights.append(float(item))
        except (TypeError, ValueError):
            continue
    return weights
