"""Files whose names are the content of other files, or that a link stands for: none may lead out of its folder."""

from pathlib import Path

from megajax.config.errors import UserError


def is_plain(name: object) -> bool:
    """Whether a name is that of an entry of a folder: text without separators, and neither "." nor ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def is_below(name: object) -> bool:
    """Whether a name is that of a file in a folder or in a folder below it: plain names with "/" between them."""
    return isinstance(name, str) and all(is_plain(part) for part in name.split("/"))


def demand_inside(path: Path) -> None:
    """Raises UserError for a link that leads out of the folder, other than within the cache of huggingface_hub."""
    folder, target = path.parent.resolve(), path.resolve()
    cache = folder.parent.parent if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(cache):
        raise UserError(f"{path} is a link out of its folder, to {target}: put the file itself there")
