"""What an error of writing means, and what to change."""

import errno
import os
import re
import resource
from collections.abc import Callable, Mapping

from megajax.display.text import byte_size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that free space mends."""


def _size_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "the file system holds no larger file: name a folder on another one"
    return f"this process may write files of at most {byte_size(limit)}: raise the limit with ulimit -f unlimited"


def _open_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process may open {limit:,} files: raise the limit with ulimit -n"


REMEDIES: Mapping[int, str | Callable[[], str]] = {
    errno.ENOSPC: "free space there, or name a folder on another disk",
    errno.EDQUOT: "your quota there is used up: delete files of yours, or name a folder elsewhere",
    errno.EFBIG: _size_limit,
    errno.EROFS: "it is mounted read-only: name another folder",
    errno.EACCES: "check the permissions there, or name another folder",
    errno.EPERM: "check the permissions there, or name another folder",
    errno.ESTALE: "the file server has lost it: mount it again, or name another folder",
    errno.EIO: "the disk or the file server fails: check it, or name a folder on another one",
    errno.EMFILE: _open_limit,
}


def error_number(error: BaseException, text: str | None = None) -> int | None:
    """The errno of an error, also of a library that has it only in its message; None if it has none.

    text: the message; None: the error's.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error) if text is None else text
    if match := re.search(r"OS error (\d+)", text):
        return int(match[1])
    return next((number for number in REMEDIES if os.strerror(number).lower() in text.lower()), None)


def remedy(number: int | None) -> str:
    """What to change; "" if unknown."""
    known = REMEDIES.get(number or 0, "")
    return known if isinstance(known, str) else known()


def write_fault(error: OSError) -> str:
    """Cause and remedy of an error of writing, such as "No space left on device; free space there, or …"."""
    number = error_number(error)
    cause = error.strerror or (os.strerror(number) if number is not None else str(error))
    return f"{cause}; {advice}" if (advice := remedy(number)) else cause
