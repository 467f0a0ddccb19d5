"""Small states in local checkpoints, and damage to them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np


def small(step: int) -> dict[str, Any]:
    """A state that tells its step."""
    return {"w": jax.device_put(np.full((4, 4), step, np.float32))}


def like(tree: Any) -> Any:
    """What a reader takes for the layout of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def sets(folder: Path) -> list[Path]:
    """The committed sets below folder/node, by process and step."""
    return sorted(path.parent for path in (folder / "node").rglob("manifest.json"))


def pack_of(process: int) -> str:
    """The file with the shards of a process."""
    return f"arrays/process_{process}/00000.bin"


def damage(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
