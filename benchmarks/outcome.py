"""Files of figures: benchmarks/results/NAME.json, each with its command, versions and machine."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("flax", "orbax-checkpoint", "grain", "numpy", "tiktoken", "tokenizers"),
)


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write figures to a file. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described(figures), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def file_for(name: str, place: bool | Path, source: str | None) -> Path:
    """The file that --json names; without a name, results/NAME.json, or NAME_CONFIG.json for a part with a config."""
    if place is not True:
        return Path(place)
    file, _, function = Path(source or "").name.partition(":")
    return RESULTS / f"{'_'.join(part for part in (name, file.removesuffix('.py'), function) if part)}.json"


def described(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with command, commit, machine, and versions of those PACKAGES that are installed."""
    return {
        "command": " ".join(["python", "-m", "benchmarks", *map(_without_folder, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, load {os.getloadavg()[0]:.1f} at the end",
        "versions": {"python": platform.python_version()}
        | {package: version for package in PACKAGES if (version := _version(package)) is not None},
        "figures": figures,
    }


def label(name: str, sizes: dict[str, int]) -> str:
    """The name of a kernel at some sizes, in tables and predictions."""
    return " ".join([name, *(f"{axis}={size}" for axis, size in sizes.items())])


def rounded(value: Any, digits: int = 4) -> Any:
    """Figures with floats rounded to so many significant digits, also in lists and dictionaries."""
    if isinstance(value, dict):
        return {name: rounded(part, digits) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _commit() -> str:
    """The commit of the tree. For a copy without history: the variable COMMIT, or ""."""
    if commit := os.environ.get("COMMIT"):
        return commit
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_folder(argument: str) -> str:
    """An argument without the folders of this machine."""
    return argument if argument.startswith("--") else Path(argument).name


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
