"""The config of T5; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from megajax.batch import Leaf
from megajax.config.bounds import Size
from megajax.config.errors import Problem
from megajax.kernels.attention.request import KernelRequest
from megajax.layers.facts import LayerBuilder
from megajax.layers.norm.config import LayerNormConfig, NormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import SectionFacts


@dataclass(frozen=True, kw_only=True)
class T5Config(DecoderConfig):
    """T5 (Raffel et al. 2020), as in Megatron-LM: an encoder, and a decoder whose blocks read its output.

    Example: `mj.t5("base", encoder_length=512, sequence_length=128)`
    """

    target: ClassVar[str] = "megajax.models.t5.module:T5"
    encoder: StackConfig
    """The blocks of the encoder; the decoder's are `stack`."""
    encoder_length: Size
    """Tokens in a row of the encoder; sequence_length is the decoder's."""
    norm: NormConfig | LayerBuilder = field(default_factory=LayerNormConfig)
    """Normalisation after the encoder, and before the head."""
    tied: bool = True
    """The head uses the token embedding's table."""
    head_bias: bool = True
    """Add a bias to logits."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.prediction is not None:
            problems.append(Problem("prediction", "needs a model with one section", "set it to none"))
        for setting, block in self.stack.named_blocks().items():
            if block.cross is None:
                message = "does not read the encoder: cross is none"
                problems.append(Problem(f"stack.{setting}", message))
        problems += self.hiding_problems("hides later tokens from the encoder", "encoder")
        return problems + self._relative_problems()

    def _relative_problems(self) -> list[Problem]:
        """Relative biases must have buckets for later keys in the encoder, and none in the decoder."""
        problems = []
        for setting, mixer in self.own_mixers("encoder", "stack").items():
            relative, reads = getattr(mixer, "relative", None), setting.startswith("encoder")
            if isinstance(relative, RelativeBiasConfig) and relative.both_ways != reads:
                message = "is needed in an encoder" if reads else "has buckets for later tokens, which are masked"
                problems.append(Problem(f"{setting}.relative.both_ways", message, f"set it to {str(reads).lower()}"))
        return problems

    def named_stacks(self) -> dict[str, StackConfig | SegmentsConfig]:
        """The layers of the encoder and of the decoder, by setting."""
        return {"encoder": self.encoder, "stack": self.stack}

    def length_of(self, setting: str) -> int:
        """Tokens in a row of the encoder or of the decoder."""
        return self.encoder_length if setting.startswith("encoder") else self.sequence_length

    def known_rows(self, stack: str, request: KernelRequest) -> KernelRequest:
        """Adds that keys of another sequence are the encoder's."""
        return replace(super().known_rows(stack, request), key_length=self.encoder_length)

    def attention_name(self, stack: str, part: str) -> str:
        """Encoder self-attention, decoder self-attention or decoder cross-attention."""
        section = "decoder" if stack == "stack" else stack
        return f"{section} {'cross' if part == 'cross' else 'self'}-attention"

    def pads_rows(self) -> bool:
        """True: rows of the encoder and of the decoder are padded."""
        return True

    def schema(self) -> dict[str, Leaf]:
        """Tokens and padding of the encoder and of the decoder, and the decoder's labels."""
        ids = Leaf("int32", (self.sequence_length,), ("seq",), below=self.vocabulary_size)
        encoder_ids = replace(ids, shape=(self.encoder_length,))
        # segment_ids: 1 for tokens, 0 for the padding after them, which is not attended to.
        return {
            "encoder_tokens": encoder_ids,
            "encoder_segment_ids": replace(encoder_ids, below=None),
            "tokens": ids,
            "labels": ids,
            "loss_mask": Leaf("float32", ids.shape, ids.axes),
            "segment_ids": replace(ids, below=None),
        }

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """Problems of both sections on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        yield from super().mesh_problems(sizes, sequence=sequence)
        if sequence and self.encoder_length % sizes["tensor"]:
            message = f"{self.encoder_length} is not divisible by parallel.tensor={sizes['tensor']}"
            yield Problem("encoder_length", message, "needed with parallel.sequence=true")

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The encoder, and the decoder that reads its output. They share tables, which are counted for the encoder."""
        (decoder,) = super().section_facts()
        encoder = replace(decoder, path="encoder", length=self.encoder_length, stack=self.encoder)
        return encoder, replace(decoder, memory_length=self.encoder_length, weights=())

    def allows_context(self) -> bool:
        """Rows of both sections are cut into plain chunks."""
        return not self.mixers_of_whole_rows()

    def memory_length(self) -> int:
        """Tokens in a row of the encoder."""
        return self.encoder_length

    def position_count(self) -> int:
        """Rows of the table of positions, which both sections share."""
        return max(self.sequence_length, self.encoder_length)

    def sampler(self) -> str | None:
        """Samples fill in the masked spans of a text."""
        return "spans"
