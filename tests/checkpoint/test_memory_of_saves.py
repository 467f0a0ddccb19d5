"""What a process keeps of each save: nothing of ours, of jax, or of Orbax."""

import gc
from collections import Counter

import jax.numpy as jnp

from megajax.checkpoint.config import CheckpointConfig

SAVES = 6
LIBRARIES = ("megajax", "jax", "orbax", "concurrent", "asyncio", "threading")


def objects() -> Counter[str]:
    """Type -> number of objects; not the lists that the metrics of TensorStore leave, about 20 a save."""
    gc.collect()
    kinds = (type(entry) for entry in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds if str(kind.__module__).startswith(LIBRARIES))


def test_no_object_is_kept_of_a_save(tmp_path):
    state = {f"weight{index}": jnp.ones((4, 4)) for index in range(3)}
    with CheckpointConfig(keep_last=1).build(tmp_path) as manager:
        for step in range(1, 2 * SAVES + 1):
            if step == SAVES + 1:
                before = objects()
            manager.save(step, state, {})
            manager.wait()
            manager.poll()
        growth = objects() - before
    assert all(count < SAVES for count in growth.values()), growth
