"""Writes benchmark figures to benchmarks/results/NAME.json, with command, versions and machine."""

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

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("flax", "orbax-checkpoint", "grain", "numpy", "tiktoken", "tokenizers"),
)


def write(name: str, figures: dict[str, Any]) -> None:
    """Print the figures and write them down."""
    text = json.dumps(described(figures), indent=1)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def write_to(path: Path, figures: dict[str, Any], *, announce: bool = True) -> None:
    """Write them into a file of the user's choice. Raises UserError where it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described(figures), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error
    if announce:
        print(f"written: {path}", flush=True)


def file_for(benchmark: str, path: bool | Path, argv: list[str]) -> Path:
    """Where --json asks figures to go: the file named, or one in results/ named after the benchmark and its config."""
    if path is not True:
        return Path(path)
    place = next(at for at, word in enumerate(argv) if word.partition("=")[0] == "--config")
    source = argv[place].partition("=")[2] or argv[place + 1]
    file, _, function = Path(source).name.partition(":")
    return RESULTS / f"{'_'.join(part for part in (benchmark, file.removesuffix('.py'), function) if part)}.json"


def described(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with command, commit, machine, and versions of those PACKAGES that are installed."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_without_folder, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, load {os.getloadavg()[0]:.1f} at the end",
        "versions": {"python": platform.python_version()}
        | {package: version for package in PACKAGES if (version := _version(package)) is not None},
        "figures": figures,
    }


def label(name: str, sizes: dict[str, int]) -> str:
    """What a row of a kernel at some size is called in tables."""
    return " ".join([name, *(f"{axis}={size}" for axis, size in sizes.items())])


def _commit() -> str:
    """Of the tree; where it is a copy without history what COMMIT says, or ""."""
    if commit := os.environ.get("COMMIT"):
        return commit
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False).stdout.strip()


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
