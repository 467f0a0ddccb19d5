"""Compiles guides in a process of its own first, which tells how long that takes and how much memory it needs.

No thread can be stopped while llguidance compiles, and some guides of a few bytes would take hours and all memory. The
process, which runs this file alone, forks for each guide, and the system ends the fork at its limit.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from select import select
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

STARVED = 20
"""Limit of a trial's time on the clock, as a multiple of the limit of processor time: the machine may be busy."""
START = 60
"""Seconds that a new process may take to read the vocabulary."""
SPARE = 2**25
"""Bytes of addresses beyond the limit, since allocators reserve more than they use."""
STACK = 2**20
"""Limit of a trial's stack, bytes: half of what threads have where `ulimit -s` is unlimited, with 8 MiB as usual."""
LIMITS = {"step_max_items": 10_000, "max_lexer_states": 16_384, "verbose_errors": False}
"""Limits of llguidance that bound the time of a step and the growth of a guide in use: about 24 MiB."""
OUT_OF_TIME, SEGV = (signal.SIGPROF, signal.SIGALRM), signal.SIGSEGV


class Trial(NamedTuple):
    """What a guide needs."""

    size: int = 0
    """Bytes of memory."""
    exceeds: str = ""
    """"seconds", "size" or "stack" if the trial was ended at this limit."""


def new_tokenizer(library: ModuleType, pieces: Sequence[bytes], end_tokens: Sequence[int]) -> Any:
    """llguidance's table of tokens. pieces: their bytes; ff and more for those without text."""
    vocabulary = SimpleNamespace(
        tokens=pieces,
        special_token_ids=(),
        bos_token_id=None,
        eos_token_id=min(end_tokens),
        is_tokenizer_wrapper=True,
    )
    return library.LLTokenizer(vocabulary, n_vocab=len(pieces), eos_token=sorted(end_tokens))


def new_matcher(library: ModuleType, tokenizer: Any, grammar: str, *, gbnf: bool = False) -> Any:
    """A matcher; its `get_error` may tell what is wrong. grammar: as Lark, or as GBNF.

    Raises Exception for GBNF that is malformed, whose converter raises any.
    """
    if gbnf:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        grammar = gbnf_to_lark(grammar).replace("%llguidance {}", "", 1)
    # Without forcing, a mask allows every tokenization of determined text, not only the usual one.
    grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
    return library.LLMatcher(tokenizer, grammar, limits=library.LLParserLimits(**LIMITS), log_level=0)


def memory() -> tuple[int, int]:
    """Bytes of this process: that it wrote, and of addresses. 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            addresses, resident, shared = (int(pages) * resource.getpagesize() for pages in file.read().split()[:3])
    except OSError:
        return 0, 0
    return resident - shared, addresses


class Trials:
    """The process. Used by one thread at a time."""

    def __init__(self, pieces: Sequence[bytes], end_tokens: Sequence[int], seconds: float, size: int):
        """seconds: limit of processor time of a guide; size: limit of its bytes."""
        head = {"pieces": [piece.decode("latin-1") for piece in pieces], "end_tokens": list(end_tokens)}
        self._head, self._patience = head | {"seconds": seconds, "size": size}, START + STARVED * seconds
        self._process: subprocess.Popen[Any] | None = None

    def __call__(self, grammar: str, *, gbnf: bool) -> Trial:
        """Try a guide, as `new_matcher` takes it. Raises OSError if no process can be started."""
        for _ in range(2):
            try:
                return self._ask({"grammar": grammar, "gbnf": gbnf})
            except (BrokenPipeError, ValueError):
                # Something outside ended the process, such as a lack of memory.
                self.close()
        raise OSError("the process that tries guides ends before it answers")

    def _ask(self, guide: dict[str, Any]) -> Trial:
        sent = [guide]
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            # Ctrl-C is for this process, which ends the other one.
            self._process = subprocess.Popen([sys.executable, "-P", __file__], **pipes, process_group=0)
            self._end = weakref.finalize(self, _end, self._process)
            sent.insert(0, self._head)
        to, answer = self._process.stdin, self._process.stdout
        assert to is not None and answer is not None
        for value in sent:
            to.write(json.dumps(value).encode() + b"\n")
        to.flush()
        if not select([answer], [], [], self._patience)[0]:
            raise ValueError("something outside has stopped the process")
        return Trial(*json.loads(answer.readline()))

    def close(self) -> None:
        """End the process, which also ends with this object and with this process."""
        if self._process is not None:
            self._end()
            self._process = None


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Read the vocabulary, then try each guide that arrives."""
    import llguidance

    os.nice(10)
    head = json.loads(sys.stdin.readline())
    pieces = [piece.encode("latin-1") for piece in head["pieces"]]
    tokenizer = new_tokenizer(llguidance, pieces, head["end_tokens"])
    for line in sys.stdin:
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            _try(partial(new_matcher, llguidance, tokenizer, **json.loads(line)), head["seconds"], head["size"], outlet)
        os.close(outlet)
        with os.fdopen(inlet, "rb") as pipe:
            size = pipe.read()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        exceeds = "" if ended == 0 else "seconds" if -ended in OUT_OF_TIME else "stack" if ended == -SEGV else "size"
        print(json.dumps([int(size or 0), exceeds]), flush=True)


def _try(make: Callable[[], Any], seconds: float, size: int, answer: int) -> NoReturn:
    """Write the bytes that a guide and its first mask need, and end this process. The system ends it at the limits: by
    the signals of the timers, and after a failed allocation."""
    try:
        before, addresses = memory()
        most = addresses + size + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, STARVED * seconds)
        try:
            matcher = make()
        except MemoryError:
            raise
        except Exception:
            os._exit(0)  # malformed: the server will tell
        if not matcher.get_error():
            matcher.compute_bitmask()
        os.write(answer, str(max(0, memory()[0] - before)).encode())
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
