"""What jax's interpreter of Mosaic kernels lacks (0.12.0): block-scaled products, and several devices at once.

Copies of scales to tensor memory and products with scales are added, as PTX defines them; the memory, barriers and the
detection of races are those of the interpreter.

When a device ends a program, the interpreter starts the clocks of all devices anew and asserts that no device has a
barrier left, "since clusters are executed sequentially". Devices run at the same time, so that it reports races between
a copy and what waited for it, in any kernel. Both are left out; a device may then run one program of each kernel.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu

Product, Copy = gpu_callbacks.TcGen05Mma, gpu_callbacks.TcGen05Copy
LOCK = threading.RLock()
"""Devices replace the same functions."""


class ScaledProduct(Product):
    """Operands times their scales, which are multiplied as float32."""

    def __call__(self, pipeline_clock: Any, tma_thread_id: int) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        logged = gpu_callbacks.memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)
        a, b = (
            memory.get_buffer_content(key, memory.access(key, transforms), self.thread, logging_info=logged)[0]
            for key, transforms in (
                (self.a_scale_key, self.a_scale_transforms),
                (self.b_scale_key, self.b_scale_transforms),
            )
        )

        class Numpy:
            def __getattr__(self, name: str) -> Any:
                return getattr(np, name)

            @staticmethod
            def matmul(x: Any, y: Any, dtype: Any) -> Any:
                scale, other = (np.repeat(scales.astype(dtype), x.shape[1] // scales.shape[1], 1) for scales in (a, b))
                return (x.astype(dtype) * scale) @ (y.astype(dtype) * other[: y.shape[1]].T)

        fields = dict.fromkeys(("a_scale_key", "b_scale_key", "a_scale_transforms", "b_scale_transforms"))
        with LOCK, patch.object(gpu_callbacks, "np", Numpy()):
            return Product.__call__(replace(self, **fields), pipeline_clock, tma_thread_id)


class CopyOfScales(Copy):
    """[tiles, blocks / 4, 32, 16] in shared memory to [128 tiles, blocks] in tensor memory."""

    def __call__(self, pipeline_clock: Any, tma_thread_id: int) -> Any:
        memory, key = gpu_callbacks._get_shared_memory(), self.tmem_key
        plain = type(memory).store_buffer_content.__get__(memory)

        def spread(to: Any, access: Any, content: Any, *rest: Any, **named: Any) -> Any:
            if to != key:
                return plain(to, access, content, *rest, **named)
            tiles, blocks = content.shape[:2]
            parts = content.reshape(tiles, blocks, 32, 4, 4).transpose(0, 3, 2, 1, 4)
            return plain(to, access, parts.reshape(tiles * 128, blocks * 4), *rest, **named)

        with LOCK, patch.object(memory, "store_buffer_content", spread):
            return Copy.__call__(self, pipeline_clock, tma_thread_id)


@contextmanager
def interpreted(params: mosaic_gpu.InterpretGPUParams) -> Iterator[None]:
    """Kernels of one program are interpreted, copies of scales in place of other copies to tensor memory."""
    memory = shared_memory.GPUSharedMemory
    start = memory.reset_per_cluster_state
    with (
        patch.object(primitives, "async_copy_smem_to_tmem_p", primitives.async_copy_scales_to_tmem_p),
        patch.object(gpu_callbacks, "TcGen05Mma", ScaledProduct),
        patch.object(gpu_callbacks, "TcGen05Copy", CopyOfScales),
        patch.object(
            memory, "reset_per_cluster_state", lambda self: hasattr(self, "reallocation_checker") or start(self)
        ),
        patch.object(memory, "assert_no_barriers_allocated", lambda self: None),
        mosaic_gpu.force_gpu_interpret_mode(params),
    ):
        yield
