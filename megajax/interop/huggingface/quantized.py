"""Quantized tensors of released checkpoints, read as bfloat16: FP8 in blocks (DeepSeek-V3) and MXFP4 (gpt-oss).

MXFP4 is defined by the OCP Microscaling Formats specification 1.0: blocks of 32 numbers of 4 bits (E2M1), two in a byte
with the first in the low half, share a power of two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.weight_source import Entry
from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.interop.huggingface.family import Settings
from megajax.interop.weights.foreign import Tensors

BFLOAT16, FP8 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)
FP8_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
"""Value of each byte."""
FP4_VALUES = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
FP4_PAIRS = np.stack([FP4_VALUES[np.arange(256) & 15], FP4_VALUES[np.arange(256) >> 4]], axis=-1)
"""Both values of each byte."""
BIAS = 127
"""Bias of the exponents of the scales."""


class Dequantized(ABC):
    """Dequantized tensors of a source: `megajax.interop.weights.foreign.Tensors`. Each format is a subclass."""

    suffixes: ClassVar[tuple[str, str]]
    """Suffixes of the names of a quantized tensor's numbers and of its scales."""

    def __init__(self, tensors: Tensors):
        """Raises UserError with all tensors whose scales are missing or of another shape."""
        self.where, self._tensors, stored = tensors.where, tensors, tensors.entries
        (numbers, scales), problems = self.suffixes, list[str]()
        self.entries, self._quantized = dict(stored), set[str]()
        for name in stored:
            if scales and name.endswith(scales):
                base = name.removesuffix(scales)
                del self.entries[name]
                problem = f"{base + numbers} is missing" if base + numbers not in stored else ""
                problem = problem or self.mismatch(stored[base + numbers], stored[name])
                problems += [f"{name}: {problem}"] * bool(problem)
                self.entries.pop(base + numbers, None)
                if not problem:
                    self._quantized.add(base)
                    self.entries[base] = Entry(self.shape(stored[base + numbers].shape), BFLOAT16)
        unscaled = [name for name, entry in self.entries.items() if self.lacks_scale(name, entry)]
        problems += [f"{name}: it has no scales" for name in unscaled]
        if problems:
            raise UserError(below(f"quantized tensors of {self.where} can't be read:", problems))

    def read(self, name: str) -> np.ndarray:
        if name not in self._quantized:
            return self._tensors.read(name)
        numbers, scales = (self._tensors.read(name + suffix) for suffix in self.suffixes)
        return self.values(numbers, scales)

    @abstractmethod
    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor. numbers: the shape of its stored numbers."""

    @abstractmethod
    def mismatch(self, numbers: Entry, scales: Entry) -> str:
        """Why numbers and scales do not belong together; "" if they do."""

    @abstractmethod
    def lacks_scale(self, name: str, entry: Entry) -> bool:
        """Whether a tensor without scales needs some."""

    @abstractmethod
    def values(self, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The tensor in bfloat16."""


class Fp8Blocks(Dequantized):
    """Matrices of float8_e4m3fn. Each block (128 x 128 by default) is multiplied by a scale."""

    suffixes = ("", "_scale_inv")

    def __init__(self, tensors: Tensors, block: tuple[int, int]):
        self.block = block
        super().__init__(tensors)

    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return numbers

    def mismatch(self, numbers: Entry, scales: Entry) -> str:
        if numbers.dtype != FP8 or len(numbers.shape) != 2:
            return f"scales of {numbers.dtype}{list(numbers.shape)}, which is not a matrix of {FP8}"
        expected = tuple(-(-size // side) for size, side in zip(numbers.shape, self.block, strict=True))
        return _shape_mismatch(scales, expected)

    def lacks_scale(self, name: str, entry: Entry) -> bool:
        del name
        return entry.dtype == FP8

    def values(self, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        (rows, columns), scales = self.block, scales.astype(np.float32)
        result = np.empty(numbers.shape, BFLOAT16)
        for number, row in enumerate(range(0, len(numbers), rows)):
            factors = np.repeat(scales[number], columns)[: numbers.shape[1]]
            result[row : row + rows] = FP8_VALUES[numbers[row : row + rows].view(np.uint8)] * factors
        return result


class Mxfp4(Dequantized):
    """Experts [E, out, blocks, 16] with scales [E, out, blocks], read as [E, blocks x 32, out]."""

    suffixes = ("_blocks", "_scales")

    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        experts, rows, blocks, size = numbers
        return experts, blocks * size * 2, rows

    def mismatch(self, numbers: Entry, scales: Entry) -> str:
        if numbers.dtype != np.uint8 or scales.dtype != np.uint8 or len(numbers.shape) != 4:
            return f"scales {scales.dtype} of {numbers.dtype}{list(numbers.shape)}, which are not blocks of bytes"
        return _shape_mismatch(scales, numbers.shape[:3])

    def lacks_scale(self, name: str, entry: Entry) -> bool:
        del entry
        return name.endswith(self.suffixes[0])

    def values(self, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        result = np.empty(self.shape(numbers.shape), BFLOAT16)
        for expert, (bytes_, exponents) in enumerate(zip(numbers, scales, strict=True)):
            pairs = FP4_PAIRS[bytes_].reshape(*exponents.shape, -1)
            scaled = np.ldexp(pairs, exponents.astype(np.int32)[..., None] - BIAS)
            result[expert] = scaled.reshape(len(scaled), -1).T
        return result


def _shape_mismatch(scales: Entry, expected: tuple[int, ...]) -> str:
    return "" if scales.shape == expected else f"scales {list(scales.shape)}, but {list(expected)} by the blocks"


def dequantizer(settings: Settings) -> Callable[[Tensors], Tensors]:
    """A function that dequantizes tensors by quantization_config. Unsupported formats are reported to the settings."""
    config: dict[str, Any] = settings.take("quantization_config", {})
    block, kind = config.get("weight_block_size"), config.get("quant_method")
    if not config:
        return lambda tensors: tensors
    if kind == "mxfp4":
        return Mxfp4
    sizes = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if kind == "fp8" and sizes and config.get("fmt", "e4m3") == "e4m3":
        return lambda tensors: Fp8Blocks(tensors, (block[0], block[1]))
    listing = ", ".join(
        f"{name}={config[name]}" for name in ("quant_method", "fmt", "weight_block_size") if name in config
    )
    settings.refuse("quantization_config", listing or config, "only fp8 (e4m3) in blocks and mxfp4 can be read")
    return lambda tensors: tensors
