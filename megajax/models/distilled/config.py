"""Configs of decoders that learn from another one; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import ClassVar

from megajax.batch import Leaf
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import Choice, Device, Request
from megajax.layers.checks import above_zero
from megajax.layers.facts import Elements, Matmul, prefixed
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig, text_schema
from megajax.models.facts import SectionFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationConfig:
    """The loss of distillation: weight * divergence from the teacher + label_weight * cross-entropy.

    Hinton et al. 2015 weigh the divergence by alpha * temperature**2 and the cross-entropy by 1 - alpha.

    Example: `mj.DistillationConfig(weight=0.5, label_weight=0.5)`
    """

    mixture: float = 0.0
    """The divergence: 0: forward, KL(teacher || student), whose student covers all that the teacher does; 1: reverse,
    KL(student || teacher); between, the generalised Jensen-Shannon divergence (Agarwal et al. 2024, GKD)."""
    temperature: float = 1.0
    """Divisor of the logits of both models in the divergence."""
    weight: float = 1.0
    """Weight of the divergence."""
    label_weight: float = 0.0
    """Weight of the cross-entropy of labels."""

    def problems(self) -> list[Problem]:
        problems = above_zero(temperature=self.temperature, weight=self.weight)
        if not 0 <= self.mixture <= 1:
            problems.append(Problem("mixture", f"must be between 0 and 1, got {self.mixture}"))
        if not 0 <= self.label_weight < inf:
            problems.append(Problem("label_weight", f"must be a number of at least 0, got {self.label_weight}"))
        return problems


def label_problems(model: DecoderConfig) -> list[Problem]:
    """Losses of labels that are not part of distillation."""
    problems = [] if model.prediction is None else [Problem("prediction", "has no teacher", "set it to none")]
    for name in ("label_smoothing", "z_loss"):
        if getattr(model, name):
            problems.append(Problem(name, "is not part of the loss of distillation", "set it to 0"))
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledDecoderConfig(DecoderConfig):
    """A decoder that learns from a frozen decoder with the same vocabulary. Its own weights keep their names.

    Example: `mj.with_teacher(mj.llama3("8b"), mj.llama3("70b"))`
    """

    target: ClassVar[str] = "megajax.models.distilled.module:DistilledDecoder"
    teacher: DecoderConfig
    """The teacher; checkpoint.weights loads its weights into the part `teacher`."""
    distillation: DistillationConfig
    """The loss."""

    def problems(self) -> list[Problem]:
        problems, teacher = DecoderConfig.problems(self), self.teacher
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

    def schema(self) -> dict[str, Leaf]:
        """The leaves that the student or the teacher reads; rows are the student's."""
        routes = self.routes() or self.teacher.routes()
        return text_schema(self.sequence_length, self.vocabulary_size, padding=routes)

    def student(self) -> DecoderConfig:
        """The model without its teacher."""
        return DecoderConfig(**{field.name: getattr(self, field.name) for field in fields(DecoderConfig)})

    def never_trained(self) -> tuple[str, ...]:
        """The teacher."""
        return ("teacher.*",)

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The teacher, with its head, and the student."""
        (student,), (section,) = DecoderConfig.section_facts(self), self.teacher.section_facts()
        head = self.teacher.head_facts()
        weights = prefixed("teacher", (*section.weights, *head.weights))
        scores = Matmul(inputs=Elements(replicated=section.hidden), outputs=Elements(sharded=head.columns))
        return replace(section, path="teacher", weights=weights, matmuls=(scores,), frozen=True), student

    def kernel_choices(self, request: Request, device: Device | None) -> tuple[Choice[str], ...]:
        """Choices of the student, then those of the teacher."""
        theirs = (
            choice._replace(place=f"teacher {choice.place}") for choice in self.teacher.kernel_choices(request, device)
        )
        return (*DecoderConfig.kernel_choices(self, request, device), *theirs)

    def with_kernels(self, names: Sequence[str]) -> "DistilledDecoderConfig":
        """A copy with these kernels, one for each of `kernel_choices`."""
        split = len(names) - len([layer for block in self.teacher.stack.pattern for layer in block.with_kernels()])
        student = DecoderConfig.with_kernels(self, names[:split])
        return replace(student, teacher=self.teacher.with_kernels(names[split:]))

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """Problems of both models on a mesh."""
        yield from DecoderConfig.parallel_problems(self, parallel, shards)
        if parallel.pipeline > 1:
            message = f"is {parallel.pipeline}, but the layers of a teacher are not split into stages"
            yield Problem("teacher", f"needs parallel.pipeline=1, which {message}", "use tensor or data devices")
        for problem in self.teacher.parallel_problems(parallel, shards):
            yield replace(problem, setting=f"teacher.{problem.setting}")


def with_teacher(
    student: DecoderConfig, teacher: DecoderConfig, distillation: DistillationConfig | None = None
) -> DistilledDecoderConfig:
    """The student, learning from the teacher.

    Example: `mj.with_teacher(mj.llama3("8b"), mj.llama3("70b"), mj.DistillationConfig(temperature=2.0))`
    """
    settings = {field.name: getattr(student, field.name) for field in fields(student)}
    return DistilledDecoderConfig(teacher=teacher, distillation=distillation or DistillationConfig(), **settings)
