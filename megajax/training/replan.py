"""What parallel.elastic changed in a config, to be shown and recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megajax.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """A config for the devices that are present."""

    cfg: RunConfig
    requested: int | None
    """Devices of the config's layout; None: all devices."""
    present: int
    used: int
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Setting or fact of the layout -> (before, after), before is None if unknown; empty if the config fits."""
    notes: tuple[str, ...] = ()
    """Other differences from the config's layout: losses, and memory per device."""

    def text(self) -> str:
        """8 devices wanted, 6 present: data 8 -> 6, micro_size 2 -> 1, microbatches 2 -> 4."""
        wanted = "" if self.requested is None else f"{self.requested} device{'s' * (self.requested != 1)} wanted, "
        idle = f", {self.present - self.used} idle" if self.used < self.present else ""
        return f"{wanted}{self.present} present{idle}: {self.described()}"

    def lines(self) -> list[str]:
        """Lines for the start banner; none if the layout did not change."""
        return [self.text(), *self.notes] if self.changes else []

    def described(self) -> str:
        """data 8 -> 6, micro_size 2 -> 1."""
        return ", ".join(
            f"{name.rpartition('.')[2]} {' -> '.join(map(setting_text, pair if pair[0] is not None else pair[1:]))}"
            for name, pair in self.changes.items()
        )

    def event(self) -> dict[str, Any]:
        """Fields of the event in events.jsonl."""
        changes = {name: list(pair) for name, pair in self.changes.items()}
        sizes = {"wanted": self.requested, "devices": self.present, "used": self.used}
        return {**sizes, "changes": changes, "notes": list(self.notes), "text": self.text()}


def setting_text(value: object) -> str:
    """A value of a setting in the syntax of the command line."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
