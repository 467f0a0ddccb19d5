"""Turn text into token files: `python -m megajax.preprocess --input … --output-prefix … --tokenizer=…`."""

import signal
import sys

from megajax.command_line.parser import front_door
from megajax.data.preprocessing.options import parse
from megajax.data.preprocessing.report import PreprocessingProgress


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 user error, 130 and 143 interrupted, 1 crash. All except 0 leave no output.

    Raises:
        UserError: for anything the user has to change.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    job, interval = parse(argv)
    progress = PreprocessingProgress(sys.stderr, interval)
    try:
        result = job.build(progress)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    print(result.summary())
    return 0


if __name__ == "__main__":
    front_door(main)
