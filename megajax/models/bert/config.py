"""The config of BERT; importing this imports neither jax nor flax."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from megajax.batch import Leaf
from megajax.config.bounds import Index
from megajax.config.errors import Problem
from megajax.layers.facts import Elements, LayerBuilder, Matmul, Weight, dense, norm_weights
from megajax.layers.norm.config import LayerNormConfig, NormConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import HeadFacts, SectionFacts
from megajax.models.transformer import settings_of


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """BERT (Devlin et al. 2019): an encoder with bidirectional attention.

    It predicts the masked tokens of a row and, with `next_sentence`, whether its second part follows the first.
    The default is pre-norm, as in Megatron-LM. The original BERT has norm_placement=post, `embedding_norm`, no norm
    after the stack (`norm=IdentityNorm`) and therefore a `head_norm`.

    Example: `mj.bert("base", sequence_length=512)`
    """

    target: ClassVar[str] = "megajax.models.bert.module:Bert"
    learned_positions: bool = True
    """A learned embedding for each of the sequence_length positions."""
    norm: NormConfig | LayerBuilder = field(default_factory=LayerNormConfig)
    """Normalisation after the stack."""
    head_norm: NormConfig | LayerBuilder | None = None
    """Normalisation in the masked-token head; none: the same as `norm`."""
    head_activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "gelu"
    """Activation function in the masked-token head, as in DenseMLPConfig."""
    tied: bool = True
    """The head uses the token embedding's table."""
    token_types: Index = 2
    """Number of token types, each with an embedding: the parts of a pair of sentences. 0: none."""
    next_sentence: bool = True
    """A second head predicts, from the first token, whether the second part follows the first in the text."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.prediction is not None:
            problems.append(Problem("prediction", "needs a causal model", "set it to none"))
        for setting, block in self.named_blocks().items():
            if block.norm_placement == "post" and self.residual == "float32":
                message = "needs blocks that normalise their inputs"
                problems.append(Problem("residual", f"float32 {message}, and {setting} does not", "set it to compute"))
        return problems

    def text_encoder(self) -> "BertEncoderConfig":
        """BERT without its heads."""
        return BertEncoderConfig(**settings_of(self, BertConfig))

    def causal_problems(self) -> list[Problem]:
        """Problems with causal blocks."""
        return self.hiding_problems("hides later tokens from BERT")

    def schema(self) -> dict[str, Leaf]:
        """Masked and original tokens, loss mask, padding, token types, and the label of the sentence pair."""
        ids = Leaf("int32", (self.sequence_length,), ("seq",), below=self.vocabulary_size)
        kinds = {"token_types": replace(ids, below=self.token_types)} if self.token_types else {}
        order = {"is_random": Leaf("int32", below=2)} if self.next_sentence else {}
        # segment_ids: 1 for tokens, 0 for the padding after them, which is not attended to.
        return {
            "tokens": ids,
            "labels": ids,
            "loss_mask": Leaf("float32", ids.shape, ids.axes),
            "segment_ids": Leaf("int32", ids.shape, ids.axes),
            **kinds,
            **order,
        }

    def pads_rows(self) -> bool:
        """True: pairs of sentences are padded."""
        return True

    def allows_context(self) -> bool:
        """Rows are cut into plain chunks; the next-sentence head runs on the device with the first position."""
        return not self.mixers_of_whole_rows()

    def sampler(self) -> str | None:
        """Samples fill in masked tokens."""
        return "blanks"

    def masked_norm(self) -> NormConfig | LayerBuilder:
        """Normalisation in the masked-token head."""
        return self.norm if self.head_norm is None else self.head_norm

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The section of a decoder, with a table of token types."""
        (section,) = super().section_facts()
        types = Weight("types", (self.token_types, self.hidden), (None, "embed"))
        return (replace(section, weights=(*section.weights, *[types] * (self.token_types > 0))),)

    def head_facts(self) -> HeadFacts:
        """The masked-token head has one more matrix than a decoder's; the next-sentence head reads one position."""
        head, hidden, hidden_side = super().head_facts(), self.hidden, Elements(replicated=self.hidden)
        weights = [
            *head.weights,
            *dense("masked", hidden, hidden),
            *norm_weights("masked_norm", self.masked_norm(), hidden),
            Weight("masked_bias", (self.padded_vocabulary(),), ("vocab",)),
        ]
        if self.next_sentence:
            order = Weight("order", (hidden, 2), ("embed", None)), Weight("order_bias", (2,), (None,))
            weights += [*dense("pooler", hidden, hidden), *order]
        return replace(head, weights=tuple(weights), matmuls=(Matmul(inputs=hidden_side, outputs=hidden_side),))


@dataclass(frozen=True, kw_only=True)
class BertEncoderConfig(BertConfig):
    """BERT without the heads of its pretraining: it gives the states of texts, from which embeddings are made."""

    target: ClassVar[str] = "megajax.models.bert.module:BertEncoder"

    def head_facts(self) -> HeadFacts:
        """No weights."""
        return replace(super().head_facts(), weights=())
