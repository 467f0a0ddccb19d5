"""Object stores: files of a bucket by name, through the drivers of TensorStore.

A store holds whole objects under names with "/". A write replaces an object at once or not at all. `create` succeeds
for one writer only, which is what commits and leases are made of. There are no folders, no renames and no locks.

The drivers retry 5xx, time-outs, and slow and cut connections with back-off. Every other failure, and the last retry,
is a StoreError with one line: unlike an OSError of a disk, it says nothing about the files.
"""

import functools
import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.storage.disk import write_whole
from megajax.storage.index_cache import user_cache
from megajax.storage.retried_reads import FIRST_WAIT, LONGEST_WAIT, RETRIES
from megajax.storage.safe_paths import is_below

DRIVERS: Mapping[str, str] = MappingProxyType({"s3": "s3", "gs": "gcs"})
"""Scheme of a URL -> TensorStore's driver."""
VARIABLES = MappingProxyType(
    {"endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION")}
)
"""Settings of S3 -> the environment variables that other programs read, which TensorStore does not."""
REQUEST_SECONDS = 600.0
"""Time of one request with its retries; an upload of a pack of arrays at 1 MB/s takes half of it."""
CURL_LIMITS = {"CONNECT_TIMEOUT_SECONDS": "15", "LOW_SPEED_TIME_SECONDS": "20", "LOW_SPEED_LIMIT_BYTES": "1000"}
"""A connection that is slower than 1 kB/s for 20 s is cut, and the request retried, unless the user sets others."""
REQUESTS = 8
"""Requests of `in_parallel` at a time."""
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_AUTH_TOKEN_FOR_TESTING")
SECRET_FILES = MappingProxyType(
    {
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
        "AWS_CONFIG_FILE": "~/.aws/config",
        "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
    }
)
"""Variable -> the file that credentials are read from without it."""
SECRET_LINES = re.compile(
    r"aws_(?:access_key_id|secret_access_key|session_token)\s*=\s*(\S+)"
    r'|"(?:private_key|private_key_id|refresh_token|client_secret)"\s*:\s*"([^"]+)"'
)
SECRET_FORMS = re.compile(r"(?:AKIA|ASIA)[A-Z0-9]{12,}|[\w.+/=~-]{60,}")
"""Identifiers of keys; tokens and signatures, such as those of a machine's role, which no file has."""
TOTAL = re.compile(r"total size (\d+)|ObjectSize>(\d+)<")
"""The size of an object in an answer about a range outside of it."""
FAR = 1 << 43
"""A place that no object reaches."""
NEAR = 1 << 16
"""Bytes of an object that a request about its end may read."""
REFUSED = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|Expired|AccessKeyId|Signature|Token|redential")


class StoreError(UserError):
    """A store does not answer, or refuses. Nothing is known about its files."""


class Store:
    """The objects of a bucket whose names begin with a prefix.

    Attributes:
        url: of the prefix, without "/" at its end.
    """

    def __init__(self, url: str, objects: Any, prefix: str = ""):
        """objects: a tensorstore.KvStore. prefix: of the names in it; "" or with "/" at its end."""
        self.url, self._objects, self._prefix = url, objects, prefix

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self.url).name

    def below(self, part: str) -> "Store":
        """The store of the names that begin with part/."""
        return Store(f"{self.url}/{part}", self._objects, f"{self._prefix}{part}/")

    def parent(self) -> "Store":
        """The store of which this is a part."""
        prefix, slash = self._prefix.rstrip("/").rpartition("/")[:2]
        return Store(self.url.rpartition("/")[0], self._objects, prefix + slash)

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of all objects that begin with a prefix. Raises StoreError."""
        first = self._prefix + prefix
        names = map(bytes.decode, self._wait(self._objects.list(_range(first)), prefix, "listed"))
        # Not all servers that speak a store's protocol obey the end of a range.
        return sorted(name[len(self._prefix) :] for name in names if name.startswith(first))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of an object. Raises FileNotFoundError, ValueError if it ends before `stop`, StoreError."""
        return self.part(name, start, stop)[0]

    def part(self, name: str, start: int = 0, stop: int | None = None) -> tuple[bytes, Any]:
        """As `read`, with the generation of the object."""
        future = self._objects.read(self._prefix + name, byte_range=slice(start, stop))
        result = self._wait(future, name, "read")
        if result.state == "missing":
            raise FileNotFoundError(2, os.strerror(2), f"{self.url}/{name}")
        return result.value, result.stamp.generation

    def stamp(self, name: str) -> Any:
        """The generation of an object. Raises FileNotFoundError, StoreError."""
        try:
            return self.part(name, 0, 1)[1]
        except ValueError:  # it is empty
            return self.part(name)[1]

    def generation(self, name: str) -> tuple[bytes, str]:
        """Content of a small object, b"" if there is none, and its generation, for `replace`. Raises StoreError."""
        result = self._wait(self._objects.read(self._prefix + name), name, "read")
        return result.value, result.stamp.generation

    def write(self, name: str, content: bytes | str) -> None:
        """Creates or replaces an object. Raises StoreError."""
        self._wait(self._objects.write(self._prefix + name, content), name, "written")

    def create(self, name: str, content: bytes | str) -> bool:
        """Creates an object, unless there is one of that name -> whether it did. Raises StoreError.

        An answer may be lost: if the request is sent again, the object that it finds may be its own.
        """
        previous, absent = self.generation(name)
        if previous or self.replace(name, content, absent) is not None:
            return not previous
        return self.read(name) == (content.encode() if isinstance(content, str) else content)

    def replace(self, name: str, content: bytes | str | None, generation: Any) -> Any:
        """Replaces an object, or deletes it, if it has this generation -> the new one; None if it has another.

        Raises StoreError.
        """
        future = self._objects.write(self._prefix + name, content, if_equal=generation)
        return self._wait(future, name, "written").generation or None

    def delete(self, prefix: str) -> None:
        """Deletes all objects whose names begin with a prefix. Raises StoreError."""
        for future in [self._objects.write(self._prefix + name, None) for name in self.names(prefix)]:
            self._wait(future, prefix, "deleted")

    def wrong_size(self, name: str, size: int, source: str = "the manifest says") -> str | None:
        """Why an object has not this size, which `source` begins to say, or None. Raises StoreError.

        Reads one byte: lists have no sizes.
        """
        try:
            content = self.read(name, max(size - 1, 0), size + 1)
        except ValueError as error:
            actual = _total(error)
            return None if actual in (None, size) else f"{actual} bytes, {source} {size}"
        except OSError as error:
            return str(error.strerror)
        return f"more than {size} bytes" if content else None

    def size(self, name: str) -> int:
        """Bytes of an object. Raises FileNotFoundError, StoreError.

        Lists have no sizes. S3 says it about a range outside of the object; otherwise some 20 requests of a byte each
        find a range that the object ends in, about which every answer says it.
        """
        low, high, total = 0, FAR, self._ending(name, FAR, FAR + 1)
        if total is None:
            power = bisect_left(range(FAR.bit_length()), 1, key=lambda place: self._has_no(name, 1 << place))
            low, high = (1 << power) // 2, 1 << power
            while high - low > NEAR:
                middle = (low + high) // 2
                low, high = (low, middle) if self._has_no(name, middle) else (middle, high)
            total = self._ending(name, low, high + 1)
        return total or 0

    def _has_no(self, name: str, place: int) -> bool:
        try:
            self.read(name, place, place + 1)
        except ValueError:
            return True
        return False

    def _ending(self, name: str, start: int, stop: int) -> int | None:
        """The size of an object that ends before `stop`; None if the answer does not say it."""
        try:
            self.read(name, start, stop)
        except ValueError as error:
            return _total(error)
        return None

    def _wait(self, future: Any, name: str, action: str) -> Any:
        try:
            return future.result(timeout=REQUEST_SECONDS)
        except Exception as error:  # a TimeoutError, or a class that TensorStore derives from the status
            if str(error).startswith("OUT_OF_RANGE"):
                raise ValueError(str(error)) from None
            raise StoreError(_message(f"{self.url}/{name}".rstrip("/"), action, error)) from None


def _range(prefix: str) -> Any:
    """The keys that begin with a prefix."""
    import tensorstore as ts

    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ts.KvStore.KeyRange()


def _total(error: ValueError) -> int | None:
    match = TOTAL.search(str(error))
    return None if match is None else int(match[1] or match[2])


def _secrets() -> set[str]:
    """The credentials in use, as far as they are in the environment or in files."""
    secrets = {value for name in SECRETS if (value := os.environ.get(name))}
    for name, usual in SECRET_FILES.items():
        try:
            text = Path(os.environ.get(name) or usual).expanduser().read_text(encoding="utf-8")
        except (OSError, RuntimeError, ValueError):
            continue
        secrets.update(part for pair in SECRET_LINES.findall(text) for part in pair if part)
    return secrets


def _without_secrets(text: str) -> str:
    """A server's answer, which may echo the credentials that it was sent."""
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return SECRET_FORMS.sub("***", text)


def _message(url: str, action: str, error: Exception) -> str:
    cause = re.split(r" \[\w[\w-]*=", (str(error).splitlines() or [""])[0])[0]
    cause = cause or f"no answer within {REQUEST_SECONDS:g} s"
    cause = _without_secrets(cause)
    advice = (
        "Set the clock of this machine"
        if "Skew" in cause
        else "Check the credentials (AWS_ACCESS_KEY_ID or a profile; GOOGLE_APPLICATION_CREDENTIALS) and their rights"
        if REFUSED.search(cause)
        else "Check the bucket's name and its region or endpoint (AWS_REGION, AWS_ENDPOINT_URL)"
        if cause.startswith("NOT_FOUND")
        else "Check the network and the store; the same command goes on"
    )
    return f"{url} can't be {action}: {cause[:300].rstrip('.')}. {advice}."


@functools.cache
def _objects(scheme: str, bucket: str) -> Any:
    """A tensorstore.KvStore of a bucket. Credentials are found as by other programs of the store's vendor."""
    for name, value in CURL_LIMITS.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}", value)
    import tensorstore as ts

    driver, settings = DRIVERS[scheme], dict[str, Any]()
    if scheme == "s3":
        values = {key: next(filter(None, map(os.environ.get, variables)), None) for key, variables in VARIABLES.items()}
        settings |= {key: value for key, value in values.items() if value}
        if os.environ.get("AWS_ACCESS_KEY_ID"):  # else the profile, or the machine's role
            settings["aws_credentials"] = {"type": "environment"}
    retries = {"max_retries": RETRIES, "initial_delay": f"{FIRST_WAIT}s", "max_delay": f"{LONGEST_WAIT:g}s"}
    context = ts.Context({f"{driver}_request_retries": retries})
    return ts.KvStore.open({"driver": driver, "bucket": bucket, **settings}, context=context).result()


def open_store(path: Path | str) -> Store:
    """The store of s3://BUCKET/PREFIX or gs://BUCKET/PREFIX. Raises UserError for a URL of another kind, StoreError."""
    url = store_url(path)
    if url is None:
        raise UserError(f"{path} is not s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    scheme, _, place = url.partition("://")
    bucket, _, prefix = place.partition("/")
    try:
        objects = _objects(scheme, bucket)
    except Exception as error:
        raise StoreError(_message(url, "opened", error)) from None
    return Store(url, objects, f"{prefix}/" if prefix else "")


def open_object(url: str) -> tuple[Store, str]:
    """The store of an object's folder, and its name there. Raises UserError for the URL of a bucket, StoreError."""
    place, _, name = url.rpartition("/")
    if store_url(place) is None:
        raise UserError(f"{url} names a bucket, and nothing in it")
    return open_store(place), name


def open_pattern(pattern: str) -> Store:
    """The store of the folder that all names are in that match the URL of a pattern. Raises UserError, StoreError."""
    place = re.split(r"[*[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    if place.count("/") < 2:
        raise UserError(f"{pattern} names no objects: give s3://BUCKET/FOLDER/*.parquet or the like")
    return open_store(place)


def matching(store: Store, pattern: str) -> list[str]:
    """Sorted names in the store of `open_pattern` that match, with *, ** and [...] as in `glob`. Raises StoreError."""
    wanted = pattern[len(store.url) + 1 :]
    parts = re.split(r"(\*\*/|\*\*|\*|\[[^]]+\])", wanted)
    forms = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    texts = [re.sub(r"^\[!", "[^", part) if part[:1] == "[" and part[-1:] == "]" else re.escape(part) for part in parts]
    form = re.compile("".join(forms.get(part, text) for part, text in zip(parts, texts, strict=True)))
    names = store.names(re.split(r"[*[]", wanted, maxsplit=1)[0])
    return [name for name in names if form.fullmatch(name) and name[-1:] not in ("", "/")]  # those stand for folders


def fetched(store: Store, wanted: Iterable[str]) -> Path:
    """A local folder with copies of some objects of a store, as they are now, in the user's cache.

    wanted: names, and prefixes that end with "/". Objects that do not exist are left out. Raises StoreError.
    """
    folder = user_cache() / "stores" / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    for name in (name for entry in wanted for name in store.names(entry)):
        if is_below(name):
            write_whole(folder / name, store.read(name))
    return folder


def in_parallel[T, R](work: Any, items: Iterable[T]) -> list[R]:
    """Applies `work`, which waits for a store, to each item in threads."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(work, items))
