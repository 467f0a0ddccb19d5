"""Configs of models that classify texts: BERT or a decoder with a head on its states; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from megajax.batch import Leaf
from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.config import LARGEST, below_one
from megajax.layers.facts import dense
from megajax.models.config.bert import BertConfig
from megajax.models.config.decoder import DecoderConfig
from megajax.models.facts import HeadFacts, SectionFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class TextHeadConfig(Builds):
    """What heads of texts share."""

    dropout: float = 0.1
    """Dropout rate of the states that the head reads."""

    def problems(self) -> list[Problem]:
        return below_one(dropout=self.dropout)

    def columns(self) -> int:
        """Numbers that the head makes of a state."""
        raise NotImplementedError

    def sequences(self) -> int:
        """Sequences of a row."""
        return 1

    def pools(self) -> bool:
        """Whether the head reads one state of a sequence, not all of them."""
        return False

    def dense(self) -> bool:
        """Whether a matrix and tanh precede the head."""
        return False

    def leaves(self, length: int) -> dict[str, Leaf]:
        """Labels of a row whose sequences have this length."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledHeadConfig(TextHeadConfig):
    """What heads that read one state of a sequence share."""

    pooling: Literal["first", "last", "mean"] = "first"
    """The state that stands for a sequence: that of the first token, [CLS] in BERT; of the last token, which sees the
    others in a decoder; or the mean over tokens."""
    pooler: bool = True
    """A square matrix and tanh on that state, as in BERT: the weights `pooler`, those of BERT's next_sentence."""

    def pools(self) -> bool:
        """It does."""
        return True

    def dense(self) -> bool:
        """The pooler."""
        return self.pooler


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassHeadConfig(PooledHeadConfig):
    """One class for each text or pair of texts."""

    target: ClassVar[str] = "megajax.models.classifier:ClassHead"
    classes: int
    """Number of classes."""
    label_smoothing: float = 0.0
    """Probability mass spread evenly over all classes (Szegedy et al. 2016). Not in the reported loss."""

    def problems(self) -> list[Problem]:
        problems = PooledHeadConfig.problems(self)
        if not 2 <= self.classes <= LARGEST:
            problems.append(Problem("classes", f"must be at least 2, got {self.classes}"))
        return problems + below_one(label_smoothing=self.label_smoothing)

    def columns(self) -> int:
        """A score for each class."""
        return self.classes

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The class."""
        return {"labels": Leaf("int32", below=self.classes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionHeadConfig(PooledHeadConfig):
    """One number for each text or pair of texts, by the mean squared error."""

    target: ClassVar[str] = "megajax.models.classifier:RegressionHead"

    def columns(self) -> int:
        """The number."""
        return 1

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The number."""
        return {"labels": Leaf("float32")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceHeadConfig(PooledHeadConfig):
    """One of several sequences: each gets a score, and the softmax is over the sequences of a row."""

    target: ClassVar[str] = "megajax.models.classifier:ChoiceHead"
    choices: int = 4
    """Sequences of a row."""

    def problems(self) -> list[Problem]:
        problems = PooledHeadConfig.problems(self)
        if not 2 <= self.choices <= LARGEST:
            problems.append(Problem("choices", f"must be at least 2, got {self.choices}"))
        return problems

    def columns(self) -> int:
        """The score of a sequence."""
        return 1

    def sequences(self) -> int:
        """The choices."""
        return self.choices

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The right one."""
        return {"labels": Leaf("int32", below=self.choices)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanHeadConfig(TextHeadConfig):
    """The first and the last token of an answer in the text (Devlin et al. 2019, section 4.2)."""

    target: ClassVar[str] = "megajax.models.classifier:SpanHead"
    dropout: float = 0.0
    """Dropout rate of the states that the head reads."""

    def columns(self) -> int:
        """Scores of a first and a last token."""
        return 2

    def leaves(self, length: int) -> dict[str, Leaf]:
        """Places of both; 0 where the sequence has no answer."""
        place = Leaf("int32", below=length)
        return {"starts": place, "ends": place}


type TextHead = ClassHeadConfig | RegressionHeadConfig | ChoiceHeadConfig | SpanHeadConfig


class TextClassifierConfig:
    """What BERT and a decoder with such a head share: a mixin before the config of the model.

    The weights of the layers have the names that they have in the model without it, so that a run starts from weights
    of that one with fresh=head.*, or fresh=head.*,pooler.* where it has no pooler.
    """

    __slots__ = ()
    head: TextHead

    def problems(self: Any) -> list[Problem]:
        problems = super().problems()
        if self.prediction is not None:
            problems.append(Problem("prediction", "predicts further tokens, and a classifier none", "set it to none"))
        causal = any(getattr(mixer, "causal", True) for mixer in self.own_mixers().values())
        if causal and getattr(self.head, "pooling", "") == "first":
            message = "first: the first token sees no other one in a causal model"
            problems.append(Problem("head.pooling", message, "use last or mean"))
        return problems

    def schema(self: Any) -> dict[str, Leaf]:
        """Sequences, their padding and parts, and the labels."""
        count, length = self.head.sequences(), self.sequence_length
        shape, axes = ((length,), ("seq",)) if count == 1 else ((count, length), (None, "seq"))
        ids = Leaf("int32", shape, axes, below=self.vocabulary_size)
        kinds = getattr(self, "token_types", 0)
        return {
            "tokens": ids,
            "segment_ids": Leaf("int32", shape, axes),  # 1 for tokens, 0 for the padding after them
            **({"token_types": replace(ids, below=kinds)} if kinds else {}),
            **self.head.leaves(length),
            "loss_mask": Leaf("float32", optional=True),  # weight of the row in the loss: 0 or 1
        }

    def row_positions(self: Any) -> int:
        """Tokens of a row, of all its sequences."""
        return self.head.sequences() * self.sequence_length

    def ignores_later_positions(self) -> bool:
        """It reads whole rows."""
        return False

    def sampler(self) -> str | None:
        """It shows nothing."""
        return None

    def has_dropout(self: Any) -> bool:
        """That of the head too."""
        return super().has_dropout() or self.head.dropout > 0

    def refit(self: Any, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """Learned positions of longer sequences: the first of them."""
        if path == "positions" and weight.shape[1:] == (self.hidden,) and len(weight) >= self.position_count():
            return weight[: self.position_count()]
        return super().refit(path, weight, settings)

    def section_facts(self: Any) -> tuple[SectionFacts, ...]:
        """That of the model, for each sequence of a row."""
        (section,) = super().section_facts()
        return (replace(section, sequences=self.head.sequences()),)

    def head_facts(self: Any) -> HeadFacts:
        """A few scores of one position of each sequence, or of all positions."""
        columns, hidden = self.head.columns(), self.hidden
        pooler = dense("pooler", hidden, hidden) if self.head.dense() else ()
        return HeadFacts(
            columns=columns,
            positions=self.head.sequences() if self.head.pools() else self.sequence_length,
            chunk=LARGEST,
            replicated=True,
            weights=(*dense("head.linear", hidden, columns), *pooler),
        )

    def allows_context(self) -> bool:
        """Its head reads whole sequences."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class BertClassifierConfig(TextClassifierConfig, BertConfig):
    """BERT with a head that classifies texts, in place of the heads of its pretraining."""

    target: ClassVar[str] = "megajax.models.classifier:BertClassifier"
    head: TextHead
    """What is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderClassifierConfig(TextClassifierConfig, DecoderConfig):
    """A decoder with a head that classifies texts, in place of the one that predicts the next token."""

    target: ClassVar[str] = "megajax.models.classifier:DecoderClassifier"
    head: TextHead
    """What is predicted."""


def with_head(model: BertConfig | DecoderConfig, head: TextHead) -> BertClassifierConfig | DecoderClassifierConfig:
    """A model of the other classes with this head."""
    settings = {field.name: getattr(model, field.name) for field in fields(model)}
    if isinstance(model, BertConfig):
        return BertClassifierConfig(head=head, **settings)
    return DecoderClassifierConfig(head=head, **settings)
