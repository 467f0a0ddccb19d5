"""The config of quantized weights; importing this imports neither jax nor flax."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from megajax.config.class_references import Builds
from megajax.config.errors import Problem

GROUPS = {"int4": 128, "nf4": 64}
"""Format with a scale for each group of inputs -> inputs of a group by default."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Builds):
    """Weight matrices in 8 or 4 bits, from `python -m megajax.convert --quantize` or made while weights are loaded.

    They are not trained; low-rank adapters beside them can be (Dettmers et al. 2023, QLoRA). Embeddings, the head,
    norms, routers and biases stay as they are. `build(model)` changes the matrices of a model.

    Example: `mj.QuantizationConfig(weights="int8")`
    """

    target: ClassVar[str] = "megajax.layers.quantization.replace_matrices:quantize"
    weights: Literal["int8", "fp8", "fp8_blocks", "mxfp8", "int4", "nf4", "nvfp4"] = "int8"
    """int8 and fp8 (e4m3) have a scale for each output of a matrix, int4 and nf4 one for each output and group of
    inputs. nf4 has 16 quantiles of a normal distribution. mxfp8 and nvfp4 have blocks of 32 and 16 inputs. fp8_blocks
    (e4m3) has tiles of 128 inputs x 128 outputs, as checkpoints of DeepSeek-V3."""
    group: int | None = None
    """Inputs that share a scale in int4 or nf4, along the last dimension of the inputs; all of a shorter one. None: 128
    in int4, 64 in nf4."""
    double: bool = False
    """Scales of int4 or nf4 are stored in 8 bits (double quantization of QLoRA)."""
    exclude: tuple[str, ...] = ()
    """Patterns of the paths of matrices that are not quantized, such as *.mixer.output; * stands for any text."""
    activations: Literal["none", "fp8"] = "none"
    """fp8: inputs of the matrices are rounded to e4m3 too, and products are of 8 bits; with weights=fp8."""
    static: bool = False
    """Scales of inputs come from a calibration; false: from each token."""
    balanced: bool = False
    """Each input is multiplied by a factor from a calibration, and its row of the matrix divided by it before rounding
    (Lin et al. 2023, AWQ)."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.group is not None and (self.group < 2 or self.group % 2):
            problems.append(Problem("group", f"must be even and at least 2, got {self.group}"))
        if self.double and self.weights not in GROUPS:
            message = f"applies to scales of groups, which {self.weights} does not have"
            problems.append(Problem("double", message, f"set weights to one of {', '.join(GROUPS)}, or double=false"))
        if self.activations != "none" and self.weights != "fp8":
            message = f"{self.activations} needs weights=fp8, not {self.weights}"
            problems.append(Problem("activations", message, "set weights=fp8, or activations=none"))
        if self.static and self.activations == "none":
            problems.append(
                Problem("static", "sets the scales of activations, and activations=none", "set activations=fp8")
            )
        return problems
