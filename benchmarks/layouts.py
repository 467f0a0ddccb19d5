"""Compares layouts on eight virtual devices with one device: the losses of five steps, and all gradients.

Run:  python benchmarks/layouts.py [--only=SUBSTRING] [--quick]
      python benchmarks/layouts.py --context [--only=SUBSTRING]

Prints one line for each combination of tests/combinations.py whose line in its table contains the substring: the
largest relative error of a loss, the largest error of a gradient over the largest gradient of its weight, that weight,
and the compile time in seconds. Computes in float32. Exits with 1 if an error is above 1e-5, or if a padding row of
stacked weights is not zero. --quick: compile without optimizations, as in the tests. Writes
benchmarks/results/layouts.json.

--context: one step with rows sharded over 2, 4 and 8 devices by every strategy, from tests/context_cases.py. Prints the
largest differences of each model and strategy. Writes benchmarks/results/context_layouts.json.
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


def compared(combination: Combination, *, quick: bool) -> dict[str, object]:
    """A line of the results, printed too."""
    apart = difference(combination.run(quick=quick), combination.on_one_device(quick=quick))
    equal = max(apart.loss, apart.norm, apart.gradient) <= TOLERANCE and apart.padding == 0
    figures = f"{apart.loss:9.1e} {apart.norm:9.1e} {apart.gradient:9.1e}  {apart.weight:32} {apart.seconds:7.1f}"
    print(f"{figures}  {'     ' if equal else 'WRONG'}  {combination.name}", flush=True)
    jax.clear_caches()
    return {
        "combination": combination.name,
        "loss": float(f"{apart.loss:.2e}"),
        "norm": float(f"{apart.norm:.2e}"),
        "gradient": float(f"{apart.gradient:.2e}"),
        "weight": apart.weight,
        "padding": apart.padding,
        "compile_seconds": round(apart.seconds, 1),
        "equal": bool(equal),
    }


def compared_over_context(case: Case) -> dict[str, object]:
    """A line of the results, printed too."""
    errors = case.difference()
    equal = max(errors.loss, errors.gradient) <= TOLERANCE
    print(f"{errors.loss:9.1e} {errors.gradient:9.1e}  {'     ' if equal else 'WRONG'}  {case.name}", flush=True)
    return {
        "model": case.model,
        "cut": case.sharding,
        "loss": float(f"{errors.loss:.2e}"),
        "gradient": float(f"{errors.gradient:.2e}"),
        "weight": errors.weight,
        "equal": bool(equal),
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
    arguments = parser.parse_args()
    if arguments.context:
        return over_context(arguments.only)
    selected = [combination for combination in COMBINATIONS if arguments.only in combination.name]
    if not selected:
        print(
            f"no combination contains {arguments.only!r}; the combinations are:",
            *(combination.name for combination in COMBINATIONS),
            sep="\n  ",
        )
        return 2
    print(f"{'loss':>9} {'norm':>9} {'gradient':>9}  {'of':32} compile s         combination")
    lines = [compared(combination, quick=arguments.quick) for combination in selected]
    mismatches = sum(not line["equal"] for line in lines)
    outcome.write("layouts", {"tolerance": TOLERANCE, "combinations": len(lines), "wrong": mismatches, "lines": lines})
    return 1 if mismatches else 0


def over_context(only: str) -> int:
    selected = [case for case in CASES if only in case.name]
    if not selected:
        print(f"no case contains {only!r}; the cases are:", *(case.name for case in CASES), sep="\n  ")
        return 2
    print(f"{'loss':>9} {'gradient':>9}         case")
    lines = [compared_over_context(case) for case in selected]
    largest(lines)
    mismatches = sum(not line["equal"] for line in lines)
    results = {"tolerance": TOLERANCE, "cases": len(lines), "wrong": mismatches, "lines": lines}
    outcome.write("context_layouts", results)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
