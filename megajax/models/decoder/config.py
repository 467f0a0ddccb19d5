"""Configs of decoders; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import ClassVar, Literal

from megajax.batch import Leaf
from megajax.config.bounds import BelowOne, Count, NotNegative, Positive, Size
from megajax.config.class_references import Builds
from megajax.config.errors import Problem, UserError
from megajax.kernels.paged.capability import PagedRequest
from megajax.layers.block.config import BlockConfig
from megajax.layers.cache_spec import CacheLeaf, paged_requests, stack_leaves
from megajax.layers.facts import HasExperts, LayerBuilder, Weight, norm_weights
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.norm.config import NormConfig, RMSNormConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.recompute import Layers, Part, Recompute
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.facts import Flops, HeadFacts, SectionFacts, count_flops
from megajax.models.protocol import ModelConfig
from megajax.models.transformer import AdaptedConfig, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(Builds):
    """Multi-token prediction: heads that predict further tokens (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

    Example: `mj.PredictionConfig(depth=1)`
    """

    target: ClassVar[str] = "megajax.models.decoder.multi_token_prediction:Prediction"
    depth: Count = 1
    """Number of tokens predicted beyond the next one, each by its own block; the blocks run in sequence."""
    reweighted: Literal["rows", "microbatches"] = "rows"
    """With batch.loss_average=tokens, the last tokens of a row have no target, and the others get larger weights, so
    that their sum is unchanged: over a row (the same on every layout) or over a microbatch (as in Megatron-LM)."""
    weight: Positive = 0.1
    """Weight of the sum of their losses, relative to the main loss. The reported loss is the main loss."""
    block: BlockConfig | None = None
    """Block of each head; none: the last block of the stack's pattern."""


@dataclass(frozen=True, kw_only=True)
class WidthScalingConfig:
    """Maximal update parametrization (muP, Yang et al. 2022) transfers settings from a narrow base model to a wide one.

    W is the ratio of the widths. Initial standard deviations of matrices inside blocks are divided by sqrt(W), logits
    by W. Adam divides the learning rate and epsilon of these matrices and of an untied head by W.

    Example: `mj.WidthScalingConfig(base_hidden=256)`
    """

    base_hidden: Size
    """Hidden size of the base model."""
    base_head_dim: Size | None = None
    """Head size of the base model. Scores are divided by head size / sqrt(base head size); none: by the head size."""
    score_power: Positive = 1.0
    """Power of the head size in that divisor; 0.5 is the usual square root."""
    embedding: Positive = 1.0
    """Factor on embeddings, including learned positions."""
    output: Positive | None = None
    """Factor on logits; none: 1 / W."""

    def score_scale(self, size: int) -> float:
        """Factor on scores of heads of this size."""
        return (1.0 if self.base_head_dim is None else self.base_head_dim**0.5) / size**self.score_power


def text_schema(length: int, vocabulary_size: int, *, padding: bool = False) -> dict[str, Leaf]:
    """The leaves of a row of text of `length` tokens. padding: with the leaf that marks positions without text.

    Example: `mj.text_schema(2048, 50257)`
    """
    ids = Leaf("int32", (length,), ("seq",), below=vocabulary_size)
    numbers = Leaf("int32", ids.shape, ids.axes)
    return {
        "tokens": ids,
        "labels": ids,  # the token that follows each input
        "loss_mask": Leaf("float32", ids.shape, ids.axes),  # weight of each label in the loss: 0 or 1
        "positions": numbers,  # as learned positions and RoPE see them
        # Number of the document within the row: tokens of different documents do not attend to each other.
        "segment_ids": replace(numbers, optional=True),
        **({"padding": replace(numbers, dtype="bool", optional=True)} if padding else {}),
    }


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(AdaptedConfig, TransformerConfig, ModelConfig):
    """A decoder language model, such as GPT and Llama.

    Example: `mj.llama3("8b", sequence_length=4096)`
    """

    target: ClassVar[str] = "megajax.models.decoder.module:DecoderLM"
    hidden: Size
    """Hidden size: width of the residual stream."""
    vocabulary_size: Size
    """Number of token ids. The table is padded to a multiple of vocabulary_multiple; the padding is never used."""
    sequence_length: Size
    """Tokens in a training row."""
    stack: StackConfig | SegmentsConfig
    """The blocks."""
    vocabulary_multiple: Size = 128
    """The padded vocabulary is a multiple of this; pipeline x tensor devices must divide it."""
    learned_positions: bool = False
    """A learned embedding for each of the sequence_length positions."""
    first_position: int = 0
    """Row of the first position in the table of learned positions: 2 in OPT."""
    embedding_norm: NormConfig | LayerBuilder | None = None
    """Normalisation of the sum of embeddings, as in BLOOM; none: no normalisation."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before the head."""
    tied: bool = False
    """The head uses the token embedding's table."""
    head_bias: bool = False
    """Add a bias to logits, as Phi and GPT-J."""
    dropout: BelowOne = 0.0
    """Dropout rate of the embedding's output."""
    residual: Literal["compute", "float32"] = "compute"
    """Dtype of the residual stream: precision.compute or float32."""
    init_std: Positive = 0.02
    """Standard deviation of initial weights. Matrices that write to the residual stream have init_std / sqrt(number of
    sub-layers): sqrt(2 * layers) with two sub-layers in each block."""
    embedding_std: Positive | None = None
    """Standard deviation of token and position embeddings (and of a tied head); none: init_std."""
    prediction: PredictionConfig | None = None
    """Heads that predict further tokens (multi-token prediction)."""
    width_scaling: WidthScalingConfig | None = None
    """muP scaling from a narrower base model."""
    lora: LoRAConfig | None = None
    """Low-rank adapters: they are trained, and the other weights only where optimizer.trainable names them."""
    quantization: QuantizationConfig | None = None
    """Weights in 8 or 4 bits, as `python -m megajax.convert --quantize` made them; none: float weights."""
    recompute: Recompute = "selective"
    """Tensors that the backward pass recomputes instead of saving: none; a list of names such as norm,activation,mlp;
    selective, which is norm,latent,activation; or full, everything but the inputs of layers. Except with none,
    attention scores are always recomputed."""
    recompute_layers: Layers | None = None
    """Apply recompute to this many layers, the first of each chunk of a pipeline stage; the other layers use the next
    cheaper setting (selective, or none). none: all layers."""
    layers_per_checkpoint: Count = 1
    """With recompute=full, number of consecutive layers recomputed together from the saved input of the first."""
    offload: tuple[Part, ...] = ()
    """Saved tensors to offload to host memory until the backward pass; input is the input of a layer."""
    unroll: Layers | None = 1
    """Layers per iteration of the compiled loop over layers (the unroll of jax.lax.scan); none: all, without a loop.
    Unrolling takes longer to compile and lets the compiler optimize across layers."""
    loss_chunk: Size = 1024
    """Tokens per chunk of the cross-entropy: only one chunk of float32 logits exists at a time."""
    label_smoothing: BelowOne = 0.0
    """Label smoothing: probability mass spread evenly over all ids but the label. Training only."""
    logit_cap: Positive | None = None
    """Soft cap: logits become cap * tanh(logit / cap) (Gemma 2); none: no cap."""
    z_loss: NotNegative = 0.0
    """Coefficient of the z-loss log(Z)^2, where Z is the softmax denominator (1e-4 in PaLM). Training only."""
    family: str = ""
    """Family of Hugging Face models that an export is written as, such as llama; "": the plainest that fits."""

    def problems(self) -> list[Problem]:
        problems = self.recompute_problems()
        if self.label_smoothing and self.vocabulary_size < 2:
            problems.append(Problem("label_smoothing", "needs at least 2 ids in the vocabulary"))
        if self.prediction is not None and self.prediction.depth >= self.sequence_length:
            message = f"{self.prediction.depth} reaches beyond sequence_length={self.sequence_length}"
            problems.append(Problem("prediction.depth", message))
        return problems + self.shape_problems() + self.causal_problems()

    def causal_problems(self) -> list[Problem]:
        """Problems with blocks that see the tokens they predict."""
        return [
            Problem(f"{setting}.causal", "shows a decoder the tokens it predicts", "set it to true")
            for setting, causal in self.causality("stack").items()
            if causal is False
        ]

    def schema(self) -> dict[str, Leaf]:
        """Tokens, labels, positions, the documents of the tokens, and for layers with experts the padding."""
        return text_schema(self.sequence_length, self.vocabulary_size, padding=self.routes())

    def routes(self) -> bool:
        """Whether a layer has experts."""
        parts = (part for block in self.named_blocks().values() for part in block.parts().values())
        return any(isinstance(part, HasExperts) for part in parts)

    def replays_experts(self) -> bool:
        """Whether batches may have the experts of tokens, see `megajax.layers.context.Context`."""
        return False

    def named_blocks(self) -> dict[str, BlockConfig]:
        """Setting -> block, for each block in the config."""
        blocks = super().named_blocks()
        block = None if self.prediction is None else self.prediction.block
        return blocks if block is None else {**blocks, "prediction.block": block}

    def predicting_blocks(self) -> tuple[BlockConfig, ...]:
        """The blocks after the stack, one for each further token."""
        if self.prediction is None:
            return ()
        return (self.prediction.block or self.stack.pattern[-1],) * self.prediction.depth

    def width_ratio(self) -> float:
        """Hidden size over that of the muP base model."""
        return 1.0 if self.width_scaling is None else self.hidden / self.width_scaling.base_hidden

    def logit_factor(self) -> float:
        """Factor on logits."""
        factor = None if self.width_scaling is None else self.width_scaling.output
        return 1 / self.width_ratio() if factor is None else factor

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        in_layers = super().has_dropout() or self.drops_inputs()
        return in_layers or any(block.has_dropout() for block in self.predicting_blocks())

    def padded_vocabulary(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    def flops(self) -> Flops:
        """Forward and backward pass per token, for whole rows."""
        return count_flops(self)  # ty: ignore[invalid-argument-type] its fields are frozen

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The sections of towers, and one that reads the token and position embeddings."""
        weights = [Weight("tokens", (self.padded_vocabulary(), self.hidden), ("vocab", "embed"))]
        if self.learned_positions:
            weights.append(Weight("positions", (self.position_count(), self.hidden), (None, "embed")))
        weights += norm_weights("embedding_norm", self.embedding_norm, self.hidden)
        section = SectionFacts(
            path="",
            hidden=self.hidden,
            length=self.sequence_length,
            stack=self.stack,
            norm=self.norm,
            residual=self.residual,
            recomputing=self.recomputing(),
            weights=tuple(weights),
            adds_positions=self.learned_positions,
        )
        return (*super().section_facts(), section)

    def head_facts(self) -> HeadFacts:
        """The vocabulary head; without weights of its own if tied."""
        table = Weight("head", (self.padded_vocabulary(), self.hidden), ("vocab", "embed"))
        bias = (Weight("head_bias", (self.padded_vocabulary(),), ("vocab",)),) * self.head_bias
        return HeadFacts(
            columns=self.padded_vocabulary(),
            positions=self.sequence_length,
            chunk=self.loss_chunk,
            weights=bias if self.tied else (table, *bias),
            ahead=self.predicting_blocks(),
        )

    def position_count(self) -> int:
        """Rows of the table of learned positions."""
        return self.sequence_length + self.first_position

    def positions(self) -> int:
        """Tokens in a row."""
        return self.sequence_length

    def row_positions(self) -> int:
        """Tokens in a row."""
        return self.sequence_length

    def ignores_later_positions(self) -> bool:
        """Whether all blocks are causal."""
        return False not in self.causality().values()

    def allows_context(self) -> bool:
        """Whether rows may be cut over devices: if no position sees later ones, and all mixers allow it."""
        return self.ignores_later_positions() and not self.mixers_of_whole_rows()

    def cache_leaves(self, tensor: int, drafts: int = 0) -> tuple[CacheLeaf, ...]:
        """Cache leaves of all layers. Raises UserError unless all blocks are causal."""
        if False in self.causality("stack").values():
            raise UserError(f"{type(self).__name__} does not generate text: its layers read later tokens too")
        return stack_leaves(self.stack, self.hidden, tensor, self.memory_length(), drafts)

    def paged_requests(self, request: PagedRequest) -> tuple[PagedRequest, ...]:
        """Paged-attention requests of the attention layers."""
        return paged_requests(self.stack, self.hidden, request)

    def sampler(self) -> str | None:
        """Samples continue a text."""
        return "continuation"

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """Problems of the model on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        tensor, cuts = sizes["tensor"], sizes["pipeline"] * sizes["tensor"]
        yield from super().mesh_problems(sizes, sequence=sequence)
        if tensor > 1:
            if self.prediction is not None and self.hidden % tensor:
                message = f"{self.hidden} is not divisible by parallel.tensor={tensor}, which shards model.prediction"
                yield Problem("hidden", message)
            if sequence and sizes["context"] == 1 and self.sequence_length % tensor:
                message = f"{self.sequence_length} is not divisible by parallel.tensor={tensor}"
                yield Problem("sequence_length", message, "needed with parallel.sequence=true")
        if cuts > 0 and self.padded_vocabulary() % cuts:
            yield Problem(
                "vocabulary_multiple",
                f"the vocabulary, padded to {self.padded_vocabulary()}, is sharded over parallel.pipeline="
                f"{sizes['pipeline']} x parallel.tensor={tensor} = {cuts} devices, which do not divide it",
                f"set model.vocabulary_multiple={lcm(self.vocabulary_multiple, cuts)}",
            )
