"""Keeps memory that a CPU run frees, instead of returning it to the kernel.

XLA allocates the buffers of a step with malloc. glibc maps blocks above a limit (128 KiB to 32 MiB) anew each time and
unmaps them when they are freed, so each step faults in, and the kernel clears, every page again: 20,600 page faults a
step in configs/quickstart.py, 13 to 23 % of its processor time. With one arena, no mapped blocks and no trimming, the
next step finds the pages that the last one freed. See mallopt(3).
"""

import ctypes
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of mallopt, from malloc.h."""
FREED_MEMORY = "MEGAJAX_FREED_MEMORY"
"""Environment variable with the value "kept" while this process keeps freed memory."""


def keep_freed_memory(environment: MutableMapping[str, str] = os.environ, library: Any = None) -> bool:
    """Keep freed memory from now on, before jax starts its threads -> whether the C library does so.

    It does not if it has no mallopt, or if the user has set its allocator by MALLOC_* or GLIBC_TUNABLES. library: the C
    library, by default that of this process.
    """
    environment.pop(FREED_MEMORY, None)  # inherited from a parent process
    tuned = any(name.startswith("MALLOC_") for name in environment)
    tuned = tuned or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    mallopt = None if tuned else getattr(library or ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)]):
        return False
    environment[FREED_MEMORY] = "kept"
    return True


def keeps_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process keeps freed memory."""
    return environment.get(FREED_MEMORY) == "kept"


def trim_once(library: Any = None) -> None:
    """Return what is free now, such as the memory of compilation, if this process keeps freed memory."""
    if keeps_freed_memory():
        (library or ctypes.CDLL(None)).malloc_trim(0)
