"""Indices of token files in object stores: read by process 0, and passed on to the machines that lack a copy."""

from collections.abc import Callable, Iterable

from megajax.config.file_paths import store_url
from megajax.mesh.processes.reading_once import copy_from_first, read_by_first
from megajax.storage.local_copies import copy_path
from megajax.storage.ranged_files import INDEX, BlockCache
from megajax.storage.stores import in_parallel


def share_indices(paths: Iterable[str], open_file: Callable[[str], object], blocks: BlockCache) -> None:
    """Reads the indices of paths in stores into `blocks`, so that each process can open them without a request.

    A collective if there are any; paths are equal on all processes. open_file: opens the token files of a path with
    `blocks`. Raises UserError on all processes for missing or damaged files.
    """
    stored = [path for path in paths if store_url(path) is not None]
    if not stored:
        return

    def look() -> dict[str, str]:
        in_parallel(open_file, stored)
        return {url: generation.hex() for url, generation in blocks.generations.items()}

    generations = read_by_first(look)
    blocks.generations |= {url: bytes.fromhex(text) for url, text in generations.items()}
    copy_from_first([copy_path(url, blocks) for url in generations if url.endswith(INDEX)])
