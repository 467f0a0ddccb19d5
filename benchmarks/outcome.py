"""Where benchmark figures go: benchmarks/results/NAME.json, with command, versions and machine."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write(name: str, figures: dict[str, Any]) -> None:
    """Print the figures and write them down."""
    root = RESULTS.parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    outcome = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
        "figures": figures,
    }
    text = json.dumps(outcome, indent=1)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
