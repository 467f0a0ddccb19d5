"""Indices of token files in object stores: read by process 0, and passed on to the machines that lack a copy."""

from collections.abc import Iterable

from megajax.config.file_paths import store_url
from megajax.data.text.indexed_dataset import IndexedTokens
from megajax.mesh.processes.reading_once import copy_from_first, read_by_first
from megajax.storage.local_copies import copy_path
from megajax.storage.ranged_files import BlockCache
from megajax.storage.stores import in_parallel


def share_indices(prefixes: Iterable[str], blocks: BlockCache) -> None:
    """Reads the indices of prefixes in stores into `blocks`, so that each process can open them without a request.

    A collective if there are any; prefixes are equal on all processes. Raises UserError on all of them for missing or
    damaged files.
    """
    urls = [url for prefix in prefixes if (url := store_url(prefix)) is not None]
    if not urls:
        return

    def look() -> dict[str, str]:
        in_parallel(lambda url: IndexedTokens(url, blocks=blocks), urls)
        return {url: generation.hex() for url, generation in blocks.generations.items()}

    blocks.generations |= {url: bytes.fromhex(text) for url, text in read_by_first(look).items()}
    copy_from_first([copy_path(f"{url}.idx", blocks) for url in urls])
