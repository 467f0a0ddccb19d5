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
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tiktoken", "tokenizers")


def write(name: str, figures: dict[str, Any]) -> None:
    """Print the figures and write them down."""
    root = RESULTS.parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    outcome = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_shown, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, load {os.getloadavg()[0]:.1f} at the end",
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
        "figures": figures,
    }
    text = json.dumps(outcome, indent=1)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def _shown(argument: str) -> str:
    """An argument without the folders of this machine."""
    return argument if argument.startswith("--") else Path(argument).name


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
