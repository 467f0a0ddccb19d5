"""What a block is made of, whatever the layout: its matrices, and how many elements each token has in its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, singledispatch

from megajax.config.errors import UserError
from megajax.kernels.capability import Request, choose
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, LatentAttentionConfig, MixerConfig
from megajax.layers.remat import NAMES, PARTS, Kept
from megajax.models.flops import block_parameters, core_matmuls, mixer_matmuls, mlp_matmuls
from megajax.planning.cost.description import Description


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in a block."""

    rows: int
    columns: int
    kind: str
    """projections, output, up or down: what `recompute` tells apart."""
    keys: int = 0
    """Columns that make keys and values."""
    groups: int = 1
    """Heads of these: with more devices of `tensor`, each holds a copy of one."""

    def local(self, tensor: int) -> tuple[float, float]:
        """(rows, columns) on one device: what leads into heads or ffn is cut by columns, what leads out by rows."""
        if self.kind in ("output", "down"):
            return self.rows / tensor, self.columns
        return self.rows, (self.columns - self.keys) / tensor + self.keys / min(tensor, self.groups)


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What a block is made of, whatever the layout."""

    matrices: tuple[Matrix, ...]
    core: int
    """Multiply-adds of attention for each pair of tokens."""
    heads: int
    parts: Mapping[str, int]
    """Elements for each token of what layers name (megajax.layers.remat) and `tensor` cuts."""
    latent: int
    """Elements for each token of the latents, which it does not."""
    keys: int
    """Elements of keys and values for each token."""
    groups: int
    """Heads of these."""
    projections: int
    """Elements of queries, keys and values for each token."""
    ffn: int
    gated: bool
    vectors: int
    """Weights that are no matrices."""
    fused: bool
    """Whether a fused kernel can compute the attention."""

    @property
    def parameters(self) -> int:
        """In matrices."""
        return sum(matrix.rows * matrix.columns for matrix in self.matrices)

    def copied(self, tensor: int) -> float:
        """Elements of keys and values for each token on one device, beyond its part of all heads.

        Times the hidden size, the weights that make them.
        """
        return self.keys * (1 / min(tensor, self.groups) - 1 / tensor)

    def held(self, hidden: int, tensor: int) -> float:
        """Weights in matrices on one device during the step."""
        return self.parameters / tensor + hidden * self.copied(tensor)

    def whole(self, hidden: int, tensor: int) -> int:
        """Weights of key-value heads that each device of `tensor` has all of at rest: where it holds copies."""
        return hidden * self.keys * (tensor > self.groups)


@lru_cache(maxsize=4096)
def block_work(block: BlockConfig, hidden: int, length: int, compute: str) -> BlockWork:
    """Raises UserError for a kind of layer that there is no formula for."""
    mixer, mlp = block.mixer, block.mlp
    try:
        whole = mlp_matmuls(mlp, hidden)
        mixing, projections, keys, gate, latent = _mixer(mixer, hidden)
        groups = mixer.groups() if isinstance(mixer, AttentionConfig) else mixer.heads
        core = core_matmuls(mixer, hidden)
    except (TypeError, AttributeError) as error:
        raise UserError(
            f"no formula for {type(mixer).__name__} with {type(mlp).__name__}.\nPlan without --formula: the compiler "
            "knows every layer."
        ) from error
    inner = 2 if isinstance(mlp, GatedMLPConfig) else 1
    ffn = whole // ((1 + inner) * hidden)
    matrices = (*mixing, Matrix(hidden, inner * ffn, "up"), Matrix(ffn, hidden, "down"))
    attention = core - mixer.heads * mixer.size(hidden)  # as wide as the values of all heads
    dtype = "bfloat16" if compute == "fp8" else compute
    request = mixer.request(Request(dtype=dtype, key_dim=mixer.size(hidden), length=length))
    held = sum(matrix.rows * matrix.columns for matrix in matrices)
    return BlockWork(
        matrices=matrices,
        core=core,
        heads=mixer.heads,
        parts={
            "query_key_value": projections,
            "core_attention": attention,
            "gate": gate,
            "mlp": inner * ffn,
            "activation": ffn,
        },
        latent=latent,
        keys=keys,
        groups=groups,
        projections=projections,
        ffn=ffn,
        gated=inner == 2,
        vectors=block_parameters(block, hidden) - held,
        fused=choose(mixer.kernel, request, None).kernel != "reference",
    )


@singledispatch
def _mixer(cfg: MixerConfig, hidden: int) -> tuple[tuple[Matrix, ...], int, int, int, int]:
    """Matrices; elements for each token of queries, keys and values; of keys and values; of a gate; of latents."""
    raise TypeError(f"no formula for {type(cfg).__name__}")


@_mixer.register
def _(cfg: AttentionConfig, hidden: int) -> tuple[tuple[Matrix, ...], int, int, int, int]:
    queries, keys = cfg.heads * cfg.size(hidden), 2 * cfg.groups() * cfg.size(hidden)
    gate = queries * cfg.gate
    projections = Matrix(hidden, queries + keys + gate, "projections", keys, cfg.groups())
    return (projections, Matrix(queries, hidden, "output")), queries + keys, keys, gate, 0


@_mixer.register
def _(cfg: LatentAttentionConfig, hidden: int) -> tuple[tuple[Matrix, ...], int, int, int, int]:
    """The narrow matrices and those behind them count as one of as many numbers."""
    size, values = cfg.size(hidden), cfg.heads * cfg.value_dim
    inner = mixer_matmuls(cfg, hidden) - values * hidden
    matrices = Matrix(hidden, round(inner / hidden), "projections"), Matrix(values, hidden, "output")
    keys = cfg.heads * size + values
    return matrices, cfg.heads * size + keys, keys, 0, cfg.key_value_rank + (cfg.query_rank or 0)


MAKES = {"projections": "query_key_value", "output": "residual", "up": "mlp"}
"""The part that comes out of a kind of matrix; what comes out of `down` no gradient needs."""


def blocks_of(run: Description) -> list[BlockWork]:
    """Of the stack's pattern, in order."""
    model = run.model
    return [block_work(block, model.hidden, model.sequence_length, run.compute) for block in model.stack.pattern]


def kept_whole(run: Description) -> tuple[float, float]:
    """Weights of key-value heads fewer than the devices of `tensor`: all that a device has at rest, and their copies
    that it holds during the step."""
    hidden, tensor, rows = run.model.hidden, run.parallel.tensor, run.rows * run.parallel.virtual_stages
    found = [(block.whole(hidden, tensor), block.groups) for block in blocks_of(run)]
    return rows * sum(weights for weights, _ in found), rows * sum(weights / groups for weights, groups in found)


def again(kept: Kept, part: str) -> bool:
    """Whether the backward pass computes a part again."""
    return kept.parts is not None and part in NAMES and part not in kept.parts


def kept_bytes(run: Description, block: BlockWork, kept: Kept) -> float:
    """Of one microbatch, by a block; what waits in host memory does not count."""
    residual, tensor = run.model.hidden / run.cut, run.parallel.tensor
    # Where nothing is computed again, norms and activations keep their inputs alone: as if all parts were named.
    here = tuple(part for part in (PARTS if kept.parts is None else kept.parts) if part not in kept.offloaded)
    elements = 0.0 if "input" in kept.offloaded else residual / kept.together
    # Norms' outputs are kept as matmuls read them: gathered along the sequence.
    elements += ("residual" in here) * residual + 2 * ("norm" in here) * run.model.hidden
    elements += ("latent" in here) * block.latent
    elements += sum(count for part, count in block.parts.items() if part in here) / tensor
    elements += ("query_key_value" in here) * block.copied(tensor)
    statistics = 4 * block.heads / tensor if "core_attention" in here and block.fused else 0
    return run.tokens * (elements * run.width + statistics)
