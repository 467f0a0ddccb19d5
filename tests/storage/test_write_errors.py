"""Messages of write errors, and their remedies."""

import errno
import os

import pytest

from megajax.storage.write_errors import REMEDIES, error_number, write_fault

TEXTS = {
    "ENOSPC": "No space left on device; free space there",
    "EDQUOT": "Disk quota exceeded; your quota there is used up",
    "EFBIG": "File too large; ",
    "EROFS": "Read-only file system; it is mounted read-only",
    "EACCES": "Permission denied; check the permissions",
    "EPERM": "Operation not permitted; check the permissions",
    "ESTALE": "Stale file handle; the file server has lost it",
    "EIO": "Input/output error; the disk or the file server fails",
    "EMFILE": "Too many open files; this process may open ",
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_error_has_a_cause_and_a_remedy(name: str) -> None:
    number = getattr(errno, name)
    error = OSError(number, os.strerror(number))
    assert write_fault(error).startswith(TEXTS[name])
    assert write_fault(OSError(f"TensorStore failed [OS error {number}: x]")).startswith(TEXTS[name])


def test_all_remedies_are_tested_and_others_have_none() -> None:
    assert {errno.errorcode[number] for number in REMEDIES} == set(TEXTS)
    assert write_fault(IsADirectoryError(errno.EISDIR, "Is a directory")) == "Is a directory"
    assert write_fault(OSError("something")) == "something" and error_number(ValueError("x")) is None
