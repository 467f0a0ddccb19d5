"""Copies of whole objects of a store on the local disk, made once by the processes of a machine.

A copy lies beside the blocks of its object, under the object's generation: an object that was replaced has another one.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.config.read_limits import utf8_text
from megajax.storage.disk import demand_space
from megajax.storage.index_cache import user_cache
from megajax.storage.ranged_files import INDEX, BlockCache, replaced
from megajax.storage.safe_paths import is_below
from megajax.storage.stores import Store, in_parallel, open_object, open_store
from megajax.storage.write_errors import write_fault

PART = 1 << 24
"""Bytes of one request."""
MODEL_FILE = re.compile(r"(additional_chat_templates/)?[^/]+\.(json|safetensors|txt|model|jinja|tiktoken)")
"""Files of a Hugging Face or PEFT folder that are read."""
SMALL_GIB = 16.0
"""Size limit of a file that a setting names: it is copied before it is read."""


def local_copy(store: Store, name: str, blocks: BlockCache, hint: str = "") -> Path:
    """A copy of an object beside its blocks. hint: follows the message about a missing object.

    Raises UserError for no such object, one beyond the limit of the cache or that can't be
    written, ChangedFile for one that is replaced meanwhile, StoreError.
    """
    url = f"{store.url}/{name}"
    if url not in blocks.generations:
        try:
            blocks.generations[url] = store.stamp(name)
        except FileNotFoundError:
            store.names(name)  # says so if there is no such bucket
            raise UserError(f"{url}: no such object{hint}") from None
    path = copy_path(url, blocks)

    def size() -> int:
        count = store.size(name)
        if path.suffix != INDEX:
            blocks.demand_limit(url, count)
            blocks.wrote(count)
        return count

    _copied(store, name, blocks.generations[url], path, size)
    return path


def copy_path(url: str, blocks: BlockCache) -> Path:
    """Where the copy of an object of a known generation is, or would be."""
    return blocks.place(url, blocks.generations[url]) / Path(url).name


def local_file(path: str | Path) -> Path:
    """The path of a file that a setting names; of an object in a store, that of its copy in the user's cache folder.

    Raises as `local_copy`.
    """
    if (url := store_url(path)) is None:
        return Path(path).expanduser()
    return local_copy(*open_object(url), BlockCache(user_cache() / "files", SMALL_GIB))


def local_folder(path: str | Path) -> Path:
    """The path of a model's folder; of one in a store, that of a copy of its files in the user's cache folder.

    Raises UserError for no such object, and as `local_copy`.
    """
    if (url := store_url(path)) is None:
        return Path(path)
    store = open_store(url)
    names = [name for name in store.names() if is_below(name) and MODEL_FILE.fullmatch(name)]
    if not names:
        raise UserError(f"{url}: there is no config.json, *.safetensors or file of a tokenizer below it")
    generations = in_parallel(store.stamp, names)
    key = hashlib.sha256(repr((url, names, generations)).encode()).hexdigest()[:24]
    folder = user_cache() / "stores" / key / store.name
    for name, generation in zip(names, generations, strict=True):
        _copied(store, name, generation, folder / name, lambda name=name: store.size(name))
    return folder


def _copied(store: Store, name: str, generation: bytes, path: Path, size: Callable[[], int]) -> None:
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _copy_lock(path):
                if not path.exists():  # another process of this machine has copied it
                    _copy(store, name, generation, path, size)
        with suppress(PermissionError):
            os.utime(path)
    except OSError as error:
        raise UserError(
            f"{path}: the copy of {store.url}/{name} can't be written: {write_fault(error)} (data.cache_dir for data, "
            "XDG_CACHE_HOME for other files)"
        ) from error


@contextmanager
def _copy_lock(path: Path) -> Generator[None]:
    """Waits for other processes of this machine that copy files here. What a killed one has left is deleted."""
    with (path.parent / ".lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in path.parent.glob(".*.copying"):
                left.unlink(missing_ok=True)
        yield


def _copy(store: Store, name: str, generation: bytes, path: Path, find_size: Callable[[], int]) -> None:
    try:
        size = find_size()
    except FileNotFoundError:
        raise replaced(f"{store.url}/{name}", "it was deleted") from None
    demand_space(path.parent, size)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.copying")
    try:
        with temporary.open("xb") as file:
            os.truncate(file.fileno(), size)

            def part(start: int) -> None:
                try:
                    content, actual = store.part(name, start, min(start + PART, size))
                except (FileNotFoundError, ValueError):
                    raise replaced(f"{store.url}/{name}", "it is shorter now, or was deleted") from None
                if actual != generation:
                    raise replaced(f"{store.url}/{name}", "it has another generation now")
                while content:
                    count = os.pwrite(file.fileno(), content, start)
                    content, start = content[count:], start + count

            in_parallel(part, range(0, size, PART))
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_text(path: str) -> str:
    """The text of a UTF-8 file, on a disk or in a store, with its original newlines. Raises UserError, StoreError."""
    try:
        return utf8_text(local_file(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}. Give a local file.") from error
