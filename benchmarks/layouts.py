"""Every layout computes the same: five steps and all gradients on eight fake devices against one device's.

Run:  python benchmarks/layouts.py [--only=SUBSTRING] [--quick]
      python benchmarks/layouts.py --context [--only=SUBSTRING]

One line for each combination of tests/combinations.py whose line of the table there has the substring: the largest
relative error of a loss, the largest error of a gradient over the largest gradient of its weight, that weight, and the
seconds to compile the layout's step. In float32. Exits 1 if an error is above 1e-5, or a row of weights that belongs to
no layer is not zero. --quick: machine code without optimisations, as the tests have it. Writes
benchmarks/results/layouts.json.

--context: a step with rows cut over 2, 4 and 8 devices, by every strategy, from tests/context_cases.py. The largest
differences of each model and strategy stand in one line. Writes benchmarks/results/context_layouts.json.
"""

import argparse
import sys
from pathlib import Path

import jax
import outcome

sys.path.append(str(Path(__file__).parents[1] / "tests"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

from combinations import COMBINATIONS, TOLERANCE, Combination, difference  # noqa: E402
from context_cases import CASES, Case  # noqa: E402


def compared(one: Combination, *, quick: bool) -> dict[str, object]:
    """A line of the results, printed too."""
    found = difference(one.run(quick=quick), one.alone(quick=quick))
    good = max(found.loss, found.norm, found.gradient) <= TOLERANCE and found.padding == 0
    figures = f"{found.loss:9.1e} {found.norm:9.1e} {found.gradient:9.1e}  {found.weight:32} {found.seconds:7.1f}"
    print(f"{figures}  {'     ' if good else 'WRONG'}  {one.name}", flush=True)
    jax.clear_caches()
    return {
        "combination": one.name,
        "loss": float(f"{found.loss:.2e}"),
        "norm": float(f"{found.norm:.2e}"),
        "gradient": float(f"{found.gradient:.2e}"),
        "weight": found.weight,
        "padding": found.padding,
        "compile_seconds": round(found.seconds, 1),
        "equal": bool(good),
    }


def compared_over_context(one: Case) -> dict[str, object]:
    """A line of the results, printed too."""
    errors = one.difference()
    good = max(errors.loss, errors.gradient) <= TOLERANCE
    print(f"{errors.loss:9.1e} {errors.gradient:9.1e}  {'     ' if good else 'WRONG'}  {one.name}", flush=True)
    return {
        "model": one.model,
        "cut": one.cut,
        "loss": float(f"{errors.loss:.2e}"),
        "gradient": float(f"{errors.gradient:.2e}"),
        "weight": errors.weight,
        "equal": bool(good),
    }


def largest(lines: list[dict[str, object]]) -> None:
    """Prints the largest difference of each model on each cut, as a table of Markdown."""
    models, every = (list(dict.fromkeys(line[name] for line in lines)) for name in ("model", "cut"))
    errors = {(line["model"], line["cut"]): max(line["loss"], line["gradient"]) for line in lines}
    print("", f"| | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|", sep="\n")
    for cut in every:
        cells = [f"{errors[model, cut]:.1e}" if (model, cut) in errors else "-" for model in models]
        print(f"| {cut} | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--context", action="store_true")
    asked = parser.parse_args()
    if asked.context:
        return over_context(asked.only)
    chosen = [one for one in COMBINATIONS if asked.only in one.name]
    if not chosen:
        print(f"no combination has {asked.only!r}; there are:", *(one.name for one in COMBINATIONS), sep="\n  ")
        return 2
    print(f"{'loss':>9} {'norm':>9} {'gradient':>9}  {'of':32} compile s         combination")
    lines = [compared(one, quick=asked.quick) for one in chosen]
    wrong = sum(not line["equal"] for line in lines)
    outcome.write("layouts", {"tolerance": TOLERANCE, "combinations": len(lines), "wrong": wrong, "lines": lines})
    return 1 if wrong else 0


def over_context(only: str) -> int:
    chosen = [one for one in CASES if only in one.name]
    if not chosen:
        print(f"no case has {only!r}; there are:", *(one.name for one in CASES), sep="\n  ")
        return 2
    print(f"{'loss':>9} {'gradient':>9}         case")
    lines = [compared_over_context(one) for one in chosen]
    largest(lines)
    wrong = sum(not line["equal"] for line in lines)
    results = {"tolerance": TOLERANCE, "cases": len(lines), "wrong": wrong, "lines": lines}
    outcome.write("context_layouts", results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
