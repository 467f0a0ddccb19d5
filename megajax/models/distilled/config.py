"""Configs of decoders that learn from another one; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from megajax.config.bounds import NotNegative, Positive, Share
from megajax.config.errors import Problem
from megajax.layers.facts import Elements, Matmul, prefixed
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import SectionFacts
from megajax.models.transformer import TransformerConfig, settings_of


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """The loss of distillation: weight * divergence from the teacher + label_weight * cross-entropy.

    Hinton et al. 2015 weigh the divergence by alpha * temperature**2 and the cross-entropy by 1 - alpha.

    Example: `mj.DistillationConfig(weight=0.5, label_weight=0.5)`
    """

    mixture: Share = 0.0
    """The divergence: 0: forward, KL(teacher || student), whose student covers all that the teacher does; 1: reverse,
    KL(student || teacher); between, the generalised Jensen-Shannon divergence (Agarwal et al. 2024, GKD)."""
    temperature: Positive = 1.0
    """Divisor of the logits of both models in the divergence."""
    weight: Positive = 1.0
    """Weight of the divergence."""
    label_weight: NotNegative = 0.0
    """Weight of the cross-entropy of labels."""


def label_problems(model: DecoderConfig) -> list[Problem]:
    """Losses of labels that are not part of distillation."""
    problems = [] if model.prediction is None else [Problem("prediction", "has no teacher", "set it to none")]
    for name in ("label_smoothing", "z_loss"):
        if getattr(model, name):
            problems.append(Problem(name, "is not part of the loss of distillation", "set it to 0"))
    return problems


@dataclass(frozen=True, kw_only=True)
class DistilledDecoderConfig(DecoderConfig):
    """A decoder that learns from a frozen decoder with the same vocabulary. Its own weights keep their names.

    Example: `mj.with_teacher(mj.llama3("8b"), mj.llama3("70b"))`
    """

    target: ClassVar[str] = "megajax.models.distilled.module:DistilledDecoder"
    frozen: ClassVar[tuple[str, ...]] = ("teacher",)
    teacher: DecoderConfig
    """The teacher; checkpoint.weights loads its weights into the part `teacher`."""
    distillation: DistillationConfig
    """The loss."""

    def problems(self) -> list[Problem]:
        problems, teacher = super().problems(), self.teacher
        for name in ("vocabulary_size", "vocabulary_multiple"):
            theirs, students = getattr(teacher, name), getattr(self, name)
            if theirs != students:
                message = f"is {theirs}, and the student's is {students}"
                problems.append(Problem(f"teacher.{name}", message, "both models need the same token ids"))
        if teacher.sequence_length < self.sequence_length:
            message = f"is {teacher.sequence_length}, below the {self.sequence_length} tokens of a row"
            problems.append(Problem("teacher.sequence_length", message, "the teacher reads the student's rows"))
        for name in ("lora", "quantization"):
            if getattr(teacher, name) is not None:
                problems.append(Problem(f"teacher.{name}", "is not available for a teacher", "set it to none"))
        if self.quantization is not None:
            problems.append(Problem("quantization", "is not available with a teacher", "set it to none"))
        return problems + label_problems(self)

    def towers(self) -> Mapping[str, TransformerConfig]:
        """The teacher."""
        return {"teacher": self.teacher}

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The student's layers: the teacher's run within the loss."""
        return {"": self.stack}

    def routes(self) -> bool:
        """Whether the student or the teacher has experts, and reads the padding of rows."""
        return super().routes() or self.teacher.routes()

    def student(self) -> DecoderConfig:
        """The model without its teacher."""
        return DecoderConfig(**settings_of(self, DecoderConfig))

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The teacher, with its head, and the student."""
        (section, student), head = super().section_facts(), self.teacher.head_facts()
        weights = (*section.weights, *prefixed("teacher", head.weights))
        scores = Matmul(inputs=Elements(replicated=section.hidden), outputs=Elements(sharded=head.columns))
        return replace(section, weights=weights, matmuls=(scores,)), student

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """Problems of both models on a mesh."""
        yield from super().parallel_problems(parallel, shards)
        if parallel.pipeline > 1:
            message = f"is {parallel.pipeline}, but the layers of a teacher are not split into stages"
            yield Problem("teacher", f"needs parallel.pipeline=1, which {message}", "use tensor or data devices")


def with_teacher(
    student: DecoderConfig, teacher: DecoderConfig, distillation: DistillationConfig | None = None
) -> DistilledDecoderConfig:
    """The student, learning from the teacher.

    Example: `mj.with_teacher(mj.llama3("8b"), mj.llama3("70b"), mj.DistillationConfig(temperature=2.0))`
    """
    loss = distillation or DistillationConfig()
    return DistilledDecoderConfig(teacher=teacher, distillation=loss, **settings_of(student))
