"""What a decoder can be told; importing this imports neither jax nor flax."""

from dataclasses import dataclass, field
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.config import AttentionConfig, NormConfig, Recompute, RMSNormConfig, StackConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(Builds):
    """A decoder language model: GPT and Llama are configs of it."""

    target: ClassVar[str] = "megajax.models.decoder:DecoderLM"
    hidden: int
    """Width of the residual stream."""
    vocabulary_size: int
    """Token ids in use; the table is padded to a multiple of vocabulary_multiple, the padding takes no part."""
    sequence_length: int
    """Tokens in a training row."""
    stack: StackConfig
    """The blocks."""
    vocabulary_multiple: int = 128
    """What the padded vocabulary is a multiple of; pipeline x tensor devices must divide it."""
    learned_positions: bool = False
    """A learned embedding for each of the sequence_length positions."""
    norm: NormConfig = field(default_factory=RMSNormConfig)
    """Normalisation before the head."""
    tied: bool = False
    """The head uses the token embedding's table."""
    dropout: float = 0.0
    """Share of the embedding's output zeroed in training."""
    init_std: float = 0.02
    """Standard deviation of initial weights; of matrices that write to the residual stream: over sqrt(2 * layers)."""
    recompute: Recompute = "selective"
    """What the backward pass recomputes: none; selective: all but the ends of matmuls; full: all but layer inputs."""
    loss_chunk: int = 1024
    """Tokens whose float32 logits exist at once."""

    def problems(self) -> list[Problem]:
        found = []
        for name in ("hidden", "vocabulary_size", "vocabulary_multiple", "sequence_length", "loss_chunk"):
            if getattr(self, name) < 1:
                found.append(Problem(name, f"must be at least 1, got {getattr(self, name)}"))
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", f"must be at least 0 and below 1, got {self.dropout}"))
        if self.init_std <= 0:
            found.append(Problem("init_std", f"must be above 0, got {self.init_std}"))
        for place, block in enumerate(self.stack.pattern):
            found += self._head_problems(f"stack.pattern.{place}.mixer", block.mixer)
        return found

    def _head_problems(self, where: str, mixer: AttentionConfig) -> list[Problem]:
        if mixer.head_dim is None and mixer.heads > 0 and self.hidden % mixer.heads:
            near = sorted(
                (n for n in range(1, self.hidden + 1) if self.hidden % n == 0), key=lambda n: abs(n - mixer.heads)
            )
            return [
                Problem(
                    f"{where}.heads",
                    f"hidden={self.hidden} is not divisible by heads={mixer.heads}",
                    f"divisors near {mixer.heads}: {', '.join(map(str, sorted(near[:3])))}",
                )
            ]
        if mixer.rope is not None and mixer.heads > 0 and mixer.size(self.hidden) % 2:
            return [Problem(f"{where}.rope", f"rotary positions need an even head size, got {mixer.size(self.hidden)}")]
        return []

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0 or any(block.dropout > 0 or block.mixer.dropout > 0 for block in self.stack.pattern)

    def padded_vocabulary(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple
