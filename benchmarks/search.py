"""Layouts found by the planner's search for shipped configs, with those of the published runs.

Run:  python benchmarks/search.py [NAME ...]

Searches each of `CASES` by formulas. With the extra aot, the three best layouts are compiled. Needs no device. Writes
benchmarks/results/search_NAME.json.
"""

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import outcome

from megajax.command_line.parser import front_door
from megajax.config.errors import UserError
from megajax.plan import main as plan

CASES = {
    "llama3_70b_64": ("llama3.py:llama3_70b", "h100:64"),
    "gpt3_175b_128": ("gpt3.py:gpt3_175b", "h100:128"),
    "gpt3_175b_1024": ("gpt3.py:gpt3_175b", "h100:1024"),
    "llama3_8b_h200": ("llama3.py", "h200:8"),
}
"""Config and devices."""


def main(names: list[str]) -> None:
    """Search those named, or all. Raises UserError for a name that is none."""
    for name in names or CASES:
        if name not in CASES:
            raise UserError(f"unknown case {name}: choose from {', '.join(CASES)}")
        config, devices = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            file, started, printed = Path(folder) / "found.json", time.monotonic(), io.StringIO()
            with contextlib.redirect_stdout(printed):
                plan([f"--config={config}", f"--devices={devices}", "--search", f"--json={file}"])
            print(printed.getvalue())
            record = json.loads(file.read_text())
        outcome.write_to(
            outcome.RESULTS / f"search_{name}.json",
            {"config": config, "wall_seconds": time.monotonic() - started, "printed": printed.getvalue().splitlines()}
            | record,
        )


if __name__ == "__main__":
    front_door(main)
