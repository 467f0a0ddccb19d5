"""What a run leaves in its folder."""

import json
from pathlib import Path
from typing import Any


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """The whole lines of a file of the folder; [] without the file."""
    path = folder / f"{name}.jsonl"
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> its line in metrics.jsonl."""
    return {line["step"]: line for line in lines(folder) if "split" not in line}


def timeless_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> the numbers of its line that depend on no clock, and not on how often the run was started."""
    clocks = ("second", "memory", "tflops", "mfu", "phases", "time", "clock", "attempt")
    return {
        step: {name: value for name, value in line.items() if not any(clock in name for clock in clocks)}
        for step, line in steps(folder).items()
    }


def exact_losses(folder: Path) -> dict[int, str]:
    """Step -> all bits of its loss."""
    return {step: line["loss_hex"] for step, line in steps(folder).items()}


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Events with one of the names; all without any."""
    return [line for line in lines(folder, "events") if not names or line["event"] in names]


def saved(folder: Path) -> list[int]:
    """Steps that have a checkpoint."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())
