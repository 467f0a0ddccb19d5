"""Arrays of devices in the memory of the host."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array


class HostArray(NamedTuple):
    """An array in host memory: the parts of this process's devices."""

    shape: tuple[int, ...]
    sharding: Any
    parts: Mapping[Any, np.ndarray]
    """By the place of the part in the array; parts that several devices have are kept once."""
    places: tuple[tuple[jax.Device, Any], ...]
    """Each device with the place of its part."""

    @classmethod
    def of(cls, array: Array) -> "HostArray":
        """A copy of an array; on CPUs the array's own memory."""
        parts, places = {}, []
        for shard in array.addressable_shards:
            place = str(shard.index)
            parts.setdefault(place, np.asarray(shard.data))
            places.append((shard.device, place))
        return cls(array.shape, array.sharding, parts, tuple(places))

    def on_devices(self) -> Array:
        """The array on the devices."""
        parts = [jax.device_put(self.parts[place], device) for device, place in self.places]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)
