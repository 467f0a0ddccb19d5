"""Start times: import, --help, a mistyped setting, and the quickstart to its first step and its end.

Run:  python benchmarks/startup.py [--quickstart]

Writes benchmarks/results/startup.json. Times are the best of five processes; the quickstart runs once.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import outcome

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.py"


def process(*arguments: str) -> float:
    """Seconds of `python *arguments`, the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
        best = min(best, time.perf_counter() - start)
    return round(best, 3)


def quickstart() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        start, began = time.perf_counter(), time.time()
        command = [sys.executable, "-m", "megajax.train", f"--config={CONFIG}", f"--run_dir={folder}"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        events = [json.loads(line) for line in (Path(folder) / "events.jsonl").read_text().splitlines()]
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "split" not in line]
    evaluations = [line for line in lines if line.get("split") == "validation"]
    first = next(event for event in events if event["event"] == "first_step")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {
        "seconds_to_first_step": round(first["time"] - began, 1),
        "seconds_to_end": round(seconds, 1),
        "steps": len(steps),
        "median_step_ms": round(1e3 * sorted(s["step_seconds"] for s in steps)[len(steps) // 2], 1),
        "first_loss": round(steps[0]["loss"], 4),
        "last_loss": round(steps[-1]["loss"], 4),
        "validation_loss": round(evaluations[-1]["loss"], 4),
        "peak_memory_gib": round(peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quickstart", action="store_true", help="also run the whole quickstart, about two minutes")
    arguments = parser.parse_args()
    front = ("-m", "megajax.train")
    figures: dict[str, object] = {
        "python_seconds": process("-c", "pass"),
        "import_megajax_seconds": process("-c", "import megajax"),
        "help_seconds": process(*front, "--help"),
        "mistyped_setting_seconds": process(*front, f"--config={CONFIG}", "--paralel.tensor=2"),
        "print_config_seconds": process(*front, f"--config={CONFIG}", "--print-config"),
    }
    if arguments.quickstart:
        figures["quickstart"] = quickstart()
    outcome.write("startup", figures)


if __name__ == "__main__":
    main()
