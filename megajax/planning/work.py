"""How long one device computes: matmuls, attention and what streams through memory, of a block and of the head.

Times are of one microbatch. T tokens of a microbatch on a device of `context`, D hidden, F ffn, t devices of `tensor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, singledispatch

from megajax.config.errors import UserError
from megajax.kernels.capability import Request, choose
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, LatentAttentionConfig, MixerConfig
from megajax.layers.kept import NAMES, Kept
from megajax.models.flops import block_parameters, core_matmuls, mixer_matmuls, mlp_matmuls
from megajax.planning.description import Description

ATTENTION_BACKWARD = 2.5
"""Operations of fused attention backward over forward: the scores, computed again, and four gradients against two."""
CAST_BYTES = 4
"""Traffic of casting one element to fp8: read in bfloat16, written twice, as it is and transposed."""
LOGIT_BYTES = 24
"""Traffic of one logit where the loss works in chunks: float32 written and read for maximum, sum, gradient, which is
written and read twice in bfloat16."""
UNFUSED_LOGIT_BYTES = 44
"""The same with a loss of separate steps, each of which reads and writes all logits in float32."""
SCORE_BYTES = 24
"""Traffic of one attention score, forward and backward, where scores are kept: softmax, mask and gradients."""
RESIDUAL_PASSES = 22
"""Reads and writes of an array of T x D by a block's norms and additions, forward and backward."""
FFN_PASSES = {2: 5, 3: 8}
"""The same of T x F, by number of the MLP's matrices: the activation alone, or gate and product as well."""


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
    """Elements for each token of what layers name (megajax.layers.kept) and `tensor` cuts."""
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


@dataclass(slots=True)
class Seconds:
    """Of one device, by what bounds it."""

    matmul: float = 0.0
    attention: float = 0.0
    stream: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.stream

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """The sum with another, taken that many times."""
        return Seconds(
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
            self.stream + times * other.stream,
        )


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward, which includes what is computed again."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


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


def block_time(run: Description, block: BlockWork, kept: Kept) -> Halves:
    """Of a block that keeps that much for its backward pass, without collectives."""
    device, tokens, tensor = run.device, run.tokens, run.parallel.tensor
    forward, backward, factor = Seconds(), Seconds(), run.system.overhead
    stream = device.bandwidth * device.stream / factor
    for matrix in block.matrices:
        rows, columns = matrix.local(tensor)
        once = factor * _matmul(run, tokens, rows, columns)
        forward.matmul += once
        backward.matmul += once * (2 + again(kept, MAKES.get(matrix.kind, "")))
        if run.compute == "fp8":
            # Inputs and outputs' gradients; weights are read in bfloat16 for each microbatch.
            forward.stream += CAST_BYTES * (tokens * rows + rows * columns) / stream
            backward.stream += CAST_BYTES * tokens * columns / stream
    _attention(run, block, kept, (forward, backward))
    residual = RESIDUAL_PASSES * tokens * run.model.hidden / run.cut
    inner = FFN_PASSES[2 + block.gated] * tokens * block.ffn / tensor
    # Rotations, and what attention reads and writes beside its matmuls.
    heads = 6 * tokens * (block.projections / tensor + block.copied(tensor))
    moved = (residual + inner + heads) * run.width / stream
    forward.stream += moved / 3
    parts = ("norm", "activation", "residual", "mlp")
    repeated = sum(again(kept, part) for part in parts) / len(parts)
    backward.stream += (2 + repeated) * moved / 3
    return Halves(forward, backward)


def _attention(run: Description, block: BlockWork, kept: Kept, halves: tuple[Seconds, Seconds]) -> None:
    forward, backward = halves
    device, length = run.device, run.model.sequence_length
    full = 2.0 * run.tokens * length * block.core / run.parallel.tensor
    repeated = again(kept, "core_attention")
    if block.fused:
        forward.attention += full / 2 / (device.peak * device.attention_forward)
        backward.attention += ATTENTION_BACKWARD * full / 2 / (device.peak * device.attention_backward)
        backward.attention += repeated * forward.attention
        return
    kind = "bfloat16" if run.compute == "fp8" else run.compute
    scores = run.tokens * length * block.heads / run.parallel.tensor * SCORE_BYTES * run.width / 2
    forward.attention += full / device.matmul_rate(kind) + scores / 3 / (device.bandwidth * device.stream)
    # With anything but `none` scores are computed again.
    backward.attention += 2 * full / device.matmul_rate(kind) + scores * 2 / 3 / (device.bandwidth * device.stream)
    backward.attention += (kept.parts is not None) * forward.attention


def head_time(run: Description) -> Halves:
    """Of the loss of one microbatch on one of the devices that make it, and of looking embeddings up.

    What predicts tokens further ahead is with it: its blocks, the matrices before them, and its losses.
    """
    device, model = run.device, run.model
    stages = run.parallel.pipeline if run.system.head == "spread" else 1
    vocabulary = model.padded_vocabulary() / (stages * run.parallel.tensor)
    times = 1 + len(model.predicting_blocks())
    # The loss is in 16 bits where blocks are in fp8; chunks of tokens are its rows.
    kind = "bfloat16" if run.compute == "fp8" else run.compute
    rate = device.matmul_rate(kind) * device.matmul_share(min(run.tokens, model.loss_chunk), model.hidden, vocabulary)
    factor = run.system.overhead * times
    once = factor * 2 * run.tokens * model.hidden * vocabulary / rate
    traffic = LOGIT_BYTES if run.system.fused_loss else UNFUSED_LOGIT_BYTES
    stream = device.bandwidth * device.stream / factor
    embedding = 8 * run.tokens * model.hidden * run.width / stream
    moved = traffic * run.tokens * vocabulary / stream + embedding
    forward = Seconds(matmul=once, stream=moved / 3)
    backward = Seconds(matmul=2 * once, stream=moved * 2 / 3)
    for block in model.predicting_blocks():
        work = block_work(block, model.hidden, model.sequence_length, run.compute)
        halves = block_time(run, work, run.recomputing.kept())
        merging = factor / times * _matmul(run, run.tokens, 2 * model.hidden, model.hidden / run.parallel.tensor)
        forward = forward.plus(halves.forward).plus(Seconds(matmul=merging))
        backward = backward.plus(halves.backward).plus(Seconds(matmul=2 * merging))
    return Halves(forward, backward)


def _matmul(run: Description, rows: float, contracted: float, columns: float) -> float:
    device = run.device
    rate = device.matmul_rate(run.compute) * device.matmul_share(rows, contracted, columns)
    arithmetic = 2 * rows * contracted * columns / rate
    moved = (rows * contracted + contracted * columns + rows * columns) * run.width
    return max(arithmetic, moved / (device.bandwidth * device.stream))
