"""Summarise a profiler trace: `python -m megajax.tools.trace FOLDER_OR_FILE`."""

import json

from megajax.command_line.parser import Flag, first_word, front_door, parse
from megajax.config.bounds import Count
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.tools.json_output import JSON, show

USAGE = """python -m megajax.tools.trace FOLDER_OR_FILE [--top=20] [--steps=N] [--json[=FILE]]

Summarises a trace of jax's profiler: the longest kernels and idle gaps, and collectives that overlap no computation. It
reads *.xplane.pb, also compressed (.gz); in a folder, the newest one. Traces are in RUN_DIR/profile after a run with
--profile.steps=10:12, or in the FILE of `python -m benchmarks mfu --trace=FILE`.

  --top=N          number of kernels listed (default 20)
  --steps=N        number of steps in the trace; default: the steps marked in it, or one
  --json[=FILE]    print JSON instead of text, or also write it to a file
"""
FLAGS = (Flag("top", Count, 20), Flag("steps", Count | None), JSON)


def main(argv: list[str]) -> int:
    """Print the summary.

    Raises:
        UserError: no trace, a trace without kernels, or a wrong command line.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    path = first_word(argv, "a folder or a file", USAGE)
    flags = parse(argv[1:], verb="tools.trace", flags=FLAGS, with_config=False).flags
    # By name, so that the front door can report a package that is not installed.
    find_trace, read_trace, summarize = (
        resolve(f"megajax.metrics.trace_summary:{name}") for name in ("find_trace", "read_trace", "summarize")
    )
    file = find_trace(path)
    trace = read_trace(file)
    if not trace.devices:
        raise UserError(f"{file} has no kernels: nothing ran on a device during the recording")
    result = summarize(trace.devices, steps=flags["steps"] or trace.steps or 1, top=flags["top"])
    text = resolve("megajax.display.banner:plain")(str(file), result.sections())
    show(text, json.dumps(result.values(), indent=1), flags["json"])
    return 0


if __name__ == "__main__":
    front_door(main)
