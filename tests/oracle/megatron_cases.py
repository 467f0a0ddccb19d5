"""The folder of reference values: its cases, reasons for skipped cases, and comparisons that show all differences."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

FOLDER = Path(os.environ.get("MEGAJAX_ORACLE_DIR", Path(__file__).parents[2] / ".." / "shared" / "oracle")).resolve()
FURTHER = FOLDER.parent / "oracle3"
"""Reference values of other libraries, beside those of Megatron-LM."""


def load_json(name: str) -> Any:
    """The content of a file of the folder; {} if there is none."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.is_file() else {}


def load_arrays(name: str) -> dict[str, np.ndarray]:
    """Arrays of a required file."""
    with np.load(FOLDER / name) as stored:
        return dict(stored)


def cases(actual: Iterable[str]) -> list[Any]:
    """Parameters of a test, or one skip with the reason."""
    reason = f"nothing of this kind at {FOLDER}: set MEGAJAX_ORACLE_DIR"
    return sorted(actual) or [pytest.param(None, marks=pytest.mark.skip(reason=reason))]


def unsupported(what: str) -> NoReturn:
    """Skip the case: MegaJAX does not have this yet."""
    pytest.skip(f"unsupported: {what}")


class Settings:
    """Settings that are read one by one; unread settings make the case unsupported."""

    def __init__(self, values: Mapping[str, Any]):
        self.left = dict(values)

    def take(self, name: str, default: Any = None) -> Any:
        value = self.left.pop(name, default)
        return default if value is None else value

    def only(self, name: str, *allowed: Any) -> Any:
        """A setting that must have one of these values; the first is the default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            unsupported(f"{name}={value}")
        return value

    def finish(self, ignored: Collection[str] = ()) -> None:
        """The remaining settings must be off or have no effect on the numbers: all these runs are on one device."""
        for name, value in self.left.items():
            alone = name.endswith("_parallel_size") and value == 1
            if name not in ignored and not alone and value is not None and value is not False:
                unsupported(f"{name}={value}")


class Comparison:
    """Collects every difference of a case before it fails, so that one run shows them all."""

    def __init__(self, case: str):
        self.case, self.worst, self.failures = case, dict[str, float](), list[str]()

    def check(
        self,
        kind: str,
        ours: Any,
        theirs: Any,
        tolerance: float,
        *,
        name: str = "",
        scale: float | None = None,
        rounding: np.ndarray | float = 0.0,
    ) -> None:
        """max |ours - theirs| <= tolerance * scale.

        scale: default the largest |theirs|; kind: what differences are reported by; name: which of that kind;
        rounding: by how much the stored values may have been rounded, taken off the differences.
        """
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        if ours.shape != theirs.shape:
            self.failures.append(f"{kind} {name}: shape {ours.shape}, expected {theirs.shape}")
            return
        if scale is None:
            scale = float(np.abs(theirs).max(initial=0))
        away = np.maximum(np.abs(ours - theirs) - rounding, 0)
        # Not <=, so that a NaN fails.
        relative = float(away.max(initial=0)) / scale if scale else float(away.max(initial=0))
        self.worst[kind] = max(self.worst.get(kind, 0.0), relative)
        if not relative <= tolerance:
            place = np.unravel_index(np.nanargmax(away), away.shape) if away.size else ()
            at = tuple(int(i) for i in place)
            self.failures.append(
                f"{kind} {name}: off by {relative:.3g} of {scale:.3g}, allowed {tolerance:g}; "
                f"{ours[place]:.9g} for {theirs[place]:.9g} at {at}"
            )

    def require(self, kind: str, holds: bool, message: str) -> None:
        """A fact without a tolerance."""
        if not holds:
            self.failures.append(f"{kind}: {message}")

    def finish(self) -> None:
        """Print the largest relative difference of each kind (`-rP` shows them); fail if any comparison failed."""
        print(f"{self.case}: " + ", ".join(f"{kind} {worst:.2g}" for kind, worst in self.worst.items()))
        assert self.worst or self.failures, f"nothing was compared for {self.case}"
        assert not self.failures, f"{self.case}: {len(self.failures)} differences\n" + "\n".join(self.failures)
