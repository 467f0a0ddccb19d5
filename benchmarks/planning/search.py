"""Layouts found by the planner's search."""

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.plan import main as plan

SEARCHES = {
    "llama3_70b_64": ("llama3.py:llama3_70b", "h100:64"),
    "gpt3_175b_128": ("gpt3.py:gpt3_175b", "h100:128"),
    "gpt3_175b_1024": ("gpt3.py:gpt3_175b", "h100:1024"),
    "llama3_8b_h200": ("llama3.py", "h200:8"),
}
"""Config and devices."""


def search(*, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Layouts found by the planner's search for shipped configs.

    Searches SEARCHES by formulas. With the extra aot, the three best layouts are compiled. Needs no device. --only:
    searches by name.
    """
    if unknown := [name for name in only if name not in SEARCHES]:
        raise UserError(f"unknown case {unknown[0]}: choose from {', '.join(SEARCHES)}")
    figures: dict[str, Any] = {}
    for name in only or SEARCHES:
        config, devices = SEARCHES[name]
        with tempfile.TemporaryDirectory() as folder:
            file, started, printed = Path(folder) / "found.json", time.monotonic(), io.StringIO()
            with contextlib.redirect_stdout(printed):
                plan([f"--config={config}", f"--devices={devices}", "--search", f"--json={file}"])
            seconds, text = time.monotonic() - started, printed.getvalue()
            print(text)
            head = {"config": config, "wall_seconds": seconds, "printed": text.splitlines()}
            figures[name] = head | json.loads(file.read_text())
        yield figures
