"""Whether the data files of a run still have the content that they had when its checkpoint was written."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from megajax.checkpoint.peers import Peers
from megajax.data.checksum import MODULUS, FileSum, Group, full_checksums, group_files, sample_checksums
from megajax.data.progress import Progress
from megajax.data.row_source import files_of
from megajax.data.splits import Splits

MOVABLE = re.compile(r"data\.(?:(train|valid|test)_)?paths?$")
"""Settings with paths of data files, which may change where the content does not."""

type Sums = dict[str, list[FileSum]]
type Say = Callable[[str], None]


def _quiet(*_: object) -> None:
    pass


class DataFiles:
    """The data files of a run's splits, by their content.

    Attributes:
        verify: look at every byte of each file.
        sums: split -> the sum of each of its files; empty before `look`.
    """

    def __init__(self, *, verify: bool = False, say: Say = _quiet, progress: Callable[[], None] = _quiet):
        """say: shows a line to people. progress: called now and then while files are read."""
        self.verify, self.sums = verify, dict[str, list[FileSum]]()
        self._say, self._progress = say, progress
        self._looked = False

    def look(self, splits: Splits) -> Sums:
        """The sums of the files that the splits read; all processes call it together. Raises UserError."""
        if self._looked:
            return self.sums
        files = {name: files_of(source) for name, source in splits._asdict().items()}
        groups = {name: group_files(each) for name, each in files.items() if each}
        unique = list(dict.fromkeys(group for each in groups.values() for group in each))
        if unique:
            known = dict(zip(unique, self._sums(unique), strict=True))
            self.sums = {name: [known[group] for group in each] for name, each in groups.items()}
        self._looked = True
        return self.sums

    def _sums(self, groups: Sequence[Group]) -> list[FileSum]:
        peers, started = Peers("data"), time.monotonic()
        mine = range(peers.index, len(groups), peers.count)
        shares = peers.gather([each.plain() for each in sample_checksums(groups, mine).values()])
        samples = [FileSum(**shares[number % peers.count][number // peers.count]) for number in range(len(groups))]
        if not self.verify:
            return samples
        shown = Progress("bytes", f"verifying {sum(each.files for each in samples):,} data files")

        def done(read: int, total: int) -> None:
            self._progress()
            if peers.first:
                shown(read, read / total)

        sums = full_checksums(groups, process=peers.index, processes=peers.count, report=done)
        parts = peers.gather([f"{each:x}" for each in sums])
        shown.clear()
        totals = [sum(int(part[number], 16) for part in parts) % MODULUS for number in range(len(groups))]
        took = time.monotonic() - started
        self._say(f"data verified: every byte of {sum(each.files for each in samples):,} files, in {took:.0f} s")
        return [replace(each, whole=f"{total:064x}") for each, total in zip(samples, totals, strict=True)]

    def plain(self) -> dict[str, list[dict[str, Any]]]:
        """As JSON values, for a checkpoint."""
        return {name: [each.plain() for each in sums] for name, sums in self.sums.items()}

    def compare(
        self, splits: Splits, stored: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> tuple[dict[str, str], set[str]]:
        """(What differs from the stored sums: `data: FILE` -> `old -> new`; the splits with the stored content).

        Checksums of whole files that were stored are kept where the samples agree, for the checkpoints to come.
        """
        before = {name: [FileSum(**each) for each in sums] for name, sums in stored.items()}
        now, changed, same = self.look(splits), dict[str, str](), set[str]()
        for name in [name for name in now if name in before]:
            old, new = before[name], now[name]
            if len(old) != len(new):
                changed[f"data: files of split {name}"] = f"{len(old):,} -> {len(new):,}"
                continue
            pairs = list(zip(new, old, strict=True))
            wrong = {f"data: {one.path}": text for one, other in pairs if (text := one.difference(other))}
            changed |= wrong
            if not wrong:
                same.add(name)
                self.sums[name] = [replace(one, whole=one.whole or other.whole) for one, other in pairs]
        if self.verify and same and all(each.whole is None for name in same for each in before[name]):
            self._say("the last checkpoint has no checksums of whole files; the next one has, for --verify-data to use")
        return changed, same

    def moved(self, name: str, old: Any, new: Any, same: set[str]) -> bool:
        """Whether setting `name` only names files of the same content, with the same weights, at other places."""
        match = MOVABLE.match(name)
        if match is None or not same or (match[1] is not None and match[1] not in same):
            return False
        return _weights(old) == _weights(new)


def _weights(fact: Any) -> list[float]:
    """The numbers in a list of paths as a checkpoint has it."""
    items, weights = yaml.safe_load(str(fact)), []
    for item in items if isinstance(items, list) else []:
        try:
            weights.append(float(item))
        except (TypeError, ValueError):
            continue
    return weights
