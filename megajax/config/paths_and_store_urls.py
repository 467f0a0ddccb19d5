"""Settings that are paths of a file system. URLs are refused: as a path, s3://bucket/run would be a local folder."""

import argparse
import re
import types
import typing
from pathlib import Path
from typing import get_args, get_origin

type PathText = str
"""The annotation of text settings and flags that are paths, as `Path` is of others."""

type StoredPath = Path
"""The annotation of settings and flags that are paths of a file system, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""

type StoredText = str
"""The same for text settings and flags."""

STORE = re.compile(r"(s3|gs):/+([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/+[^?#]*)?")
"""A URL of an object store; Path("s3://bucket") has lost a slash. A user's name and password are not part of it."""
FORMAT = re.compile(r"([a-z]\w*):")
STORED_FORMAT = re.compile(r"(hf|peft):")
"""Formats of folders that are read from stores."""
URL = re.compile(
    r"(?:[a-z]\w*:)?"  # the format of another library, before a path
    # Path("s3://bucket") has lost a slash. Other schemes need both, because a folder may be called a:.
    r"(?P<scheme>[A-Za-z][\w+.-]+(?=://)|(?:s3a?|gc?s|az|abfss?|wasbs?|hdfs|https?|ftp|file)(?=:/)):/+(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)


def format_prefix(name: str | Path) -> str:
    """FORMAT of FORMAT:DIR, a path in another library's format; "" for other paths."""
    match = FORMAT.match(str(name))
    return "" if match is None or store_url(name) is not None or Path(name).exists() else match[1]


def store_url(path: str | Path) -> str | None:
    """The URL of an object store, without "/" at its end; None for other paths."""
    match = STORE.fullmatch(str(path))
    return None if match is None else f"{match[1]}://{match[2]}{re.sub('/+', '/', match[3] or '').rstrip('/')}"


def names_store(name: str | Path) -> bool:
    """Whether a name is the URL of an object store, or that of a model's folder there after its format."""
    return store_url(STORED_FORMAT.sub("", str(name))) is not None


def holds_path(annotation: object) -> bool:
    """Whether a value with this annotation is a path."""
    if annotation in (PathText, StoredText, Path):
        return True
    if get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(map(holds_path, get_args(annotation)))
    return isinstance(annotation, typing.TypeAliasType) and holds_path(annotation.__value__)


def may_be_stored(annotation: object) -> bool:
    """Whether a value with this annotation may be a URL of an object store."""
    parts = [annotation.__value__] if isinstance(annotation, typing.TypeAliasType) else get_args(annotation)
    return annotation in (StoredPath, StoredText) or any(map(may_be_stored, parts))


def url_problem(value: object) -> tuple[str, str] | None:
    """Message and hint for a URL given as a path; None for others."""
    match = URL.match(str(value)) if isinstance(value, str | Path) else None
    if match is None:
        return None
    scheme = match["scheme"].lower()
    if scheme == "file":
        return f"{value} is a URL, not a path", f"write /{match['rest']}"
    hint = (
        "download it and give the path"
        if scheme in ("http", "https", "ftp")
        else "mount the bucket and give the path there"
    )
    return f"{value} is a URL, but only files and folders of a file system can be read and written", hint


def path_argument(text: str) -> str:
    """A path, as the `type` of an option of argparse, which refuses URLs."""
    if (problem := url_problem(text)) is not None:
        raise argparse.ArgumentTypeError("; ".join(problem))
    return text


def stored_argument(text: str) -> str:
    """A path or s3:// or gs://, as the `type` of an option of argparse, which refuses other URLs."""
    return text if store_url(text) is not None else path_argument(text)
