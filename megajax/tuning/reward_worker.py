"""A process that calls reward functions: JSON lines of tasks on its standard input, of results on its output.

`python -m megajax.tuning.reward_worker SECONDS FUNCTION …` imports neither jax nor the rest of MegaJAX.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

from megajax.config.class_references import resolve

DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""
GRACE = 5.0
"""A function that outlives the process that asked ends after its limit and this many seconds."""


def main(seconds: float, references: list[str]) -> None:
    """Answer tasks until the input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    tasks = os.fdopen(os.dup(0), encoding="utf-8")
    # What functions print is no result, and what they read is no task.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(**result: Any) -> None:
        output.write(json.dumps(result) + "\n")
        output.flush()

    functions = []
    for reference in references:
        try:
            functions.append(resolve(reference))
            if not callable(functions[-1]):
                raise TypeError("is not a function")
        except Exception as error:
            answer(problem=f"{reference}: cannot be loaded: {type(error).__name__}: {error}")
            return
    answer(problem="")
    for line in tasks:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        try:
            value = functions[task["function"]](task["row"]["prompt"], task["answer"], task["row"])
            result: dict[str, Any] = {"value": float(value)}
        except Exception:
            result = {"failure": traceback.format_exc(limit=-3)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer(**result)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
