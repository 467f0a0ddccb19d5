"""Configs of models that classify texts: BERT or a decoder with a head on its states; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from megajax.batch import Leaf
from megajax.config.bounds import LARGEST, BelowOne, Bounds
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.facts import dense
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import HeadFacts, SectionFacts
from megajax.models.transformer import settings_of

type Choices = Annotated[int, Bounds(at_least=2, at_most=LARGEST)]


@dataclass(frozen=True, kw_only=True)
class TextHeadConfig(Builds):
    """Settings and facts common to heads for texts."""

    dropout: BelowOne = 0.1
    """Dropout rate of the states that the head reads."""
    bias: bool = True
    """Biases of the outputs. Classifiers of decoders in transformers have none."""

    def columns(self) -> int:
        """Number of outputs of the head per state."""
        raise NotImplementedError

    def sequences(self) -> int:
        """Number of sequences in a row."""
        return 1

    def pools(self) -> bool:
        """Whether the head reads one pooled state per sequence instead of all states."""
        return False

    def dense(self) -> bool:
        """Whether a matrix and tanh precede the head."""
        return False

    def leaves(self, length: int) -> dict[str, Leaf]:
        """Label leaves of a row; length: positions in a sequence."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PooledHeadConfig(TextHeadConfig):
    """Settings common to heads that read one state per sequence."""

    pooling: Literal["first", "last", "mean"] = "first"
    """The state that represents a sequence: first: that of the first token, [CLS] in BERT; last: that of the last,
    which sees all other tokens in a decoder; mean: the mean over tokens."""
    pooler: bool = True
    """A square matrix and tanh on that state: the weights `pooler`, as in BERT's next-sentence head."""

    def pools(self) -> bool:
        """True."""
        return True

    def dense(self) -> bool:
        """Whether there is a pooler."""
        return self.pooler


@dataclass(frozen=True, kw_only=True)
class ClassHeadConfig(PooledHeadConfig):
    """One class for each text or pair of texts.

    Example: `mj.ClassHeadConfig(classes=3)`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:ClassHead"
    classes: Choices
    """Number of classes."""
    label_smoothing: BelowOne = 0.0
    """Probability mass spread evenly over all classes (Szegedy et al. 2016). Not in the reported loss."""

    def columns(self) -> int:
        """A score for each class."""
        return self.classes

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The label is a class."""
        return {"labels": Leaf("int32", below=self.classes)}


@dataclass(frozen=True, kw_only=True)
class RegressionHeadConfig(PooledHeadConfig):
    """One number for each text or pair of texts, trained with the mean squared error.

    Example: `mj.RegressionHeadConfig()`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:RegressionHead"

    def columns(self) -> int:
        """One: the predicted number."""
        return 1

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The label is a number."""
        return {"labels": Leaf("float32")}


@dataclass(frozen=True, kw_only=True)
class ChoiceHeadConfig(PooledHeadConfig):
    """One of several sequences: each gets a score, and the softmax is over the sequences of a row.

    Example: `mj.ChoiceHeadConfig(choices=4)`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:ChoiceHead"
    choices: Choices = 4
    """Number of sequences in a row."""

    def columns(self) -> int:
        """One: the score of a sequence."""
        return 1

    def sequences(self) -> int:
        """One per choice."""
        return self.choices

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The label is the index of the correct choice."""
        return {"labels": Leaf("int32", below=self.choices)}


@dataclass(frozen=True, kw_only=True)
class SpanHeadConfig(TextHeadConfig):
    """The first and the last token of an answer in the text (Devlin et al. 2019, section 4.2).

    Example: `mj.SpanHeadConfig()`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:SpanHead"
    dropout: BelowOne = 0.0
    """Dropout rate of the states that the head reads."""

    def columns(self) -> int:
        """Two: scores as the first and as the last token of the answer."""
        return 2

    def leaves(self, length: int) -> dict[str, Leaf]:
        """Positions of the first and last token; 0 if the sequence has no answer."""
        place = Leaf("int32", below=length)
        return {"starts": place, "ends": place}


type TextHead = ClassHeadConfig | RegressionHeadConfig | ChoiceHeadConfig | SpanHeadConfig


class TextClassifierConfig:
    """Mixin for BERT and decoders with a classification head; list it before the config of the model.

    Layer weights keep their names, so a run can start from the weights of the model without this head: with
    fresh=head.*, or fresh=head.*,pooler.* if that model has no pooler.
    """

    head: TextHead

    def problems(self: Any) -> list[Problem]:
        problems = super().problems()
        if self.prediction is not None:
            problems.append(Problem("prediction", "a classifier does not predict tokens", "set it to none"))
        causal = any(causal is not False for causal in self.causality().values())
        if causal and isinstance(self.head, PooledHeadConfig) and self.head.pooling == "first":
            message = "must not be first: the first token of a causal model sees no other token"
            problems.append(Problem("head.pooling", message, "use last or mean"))
        return problems

    def schema(self: Any) -> dict[str, Leaf]:
        """Sequences, their padding and token types, and the labels."""
        count, length = self.head.sequences(), self.sequence_length
        shape, axes = ((length,), ("seq",)) if count == 1 else ((count, length), (None, "seq"))
        ids = Leaf("int32", shape, axes, below=self.vocabulary_size)
        kinds = self.token_types if isinstance(self, BertConfig) else 0
        return {
            "tokens": ids,
            "segment_ids": Leaf("int32", shape, axes),  # 1 for tokens, 0 for the padding after them
            **({"token_types": replace(ids, below=kinds)} if kinds else {}),
            **self.head.leaves(length),
            "loss_mask": Leaf("float32", optional=True),  # weight of the row in the loss: 0 or 1
        }

    def row_positions(self: Any) -> int:
        """Tokens in all sequences of a row."""
        return self.head.sequences() * self.sequence_length

    def ignores_later_positions(self) -> bool:
        """False: the head reads whole rows."""
        return False

    def sampler(self) -> str | None:
        """None: no samples."""
        return None

    def has_dropout(self: Any) -> bool:
        """Whether the model or the head has dropout."""
        return super().has_dropout() or self.head.dropout > 0

    def refit(self: Any, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """Truncates learned positions of longer sequences to the first `position_count()`."""
        if path == "positions" and weight.shape[1:] == (self.hidden,) and len(weight) >= self.position_count():
            return weight[: self.position_count()]
        return super().refit(path, weight, settings)

    def section_facts(self: Any) -> tuple[SectionFacts, ...]:
        """The section of the model, run for each sequence of a row."""
        (section,) = super().section_facts()
        return (replace(section, sequences=self.head.sequences()),)

    def head_facts(self: Any) -> HeadFacts:
        """The linear layer, on one position of each sequence or on all positions, and the pooler."""
        columns, hidden = self.head.columns(), self.hidden
        pooler = dense("pooler", hidden, hidden) if self.head.dense() else ()
        return HeadFacts(
            columns=columns,
            positions=self.head.sequences() if self.head.pools() else self.sequence_length,
            chunk=LARGEST,
            replicated=True,
            weights=(*dense("head.linear", hidden, columns)[: 1 + self.head.bias], *pooler),
        )

    def allows_context(self) -> bool:
        """False: the head reads whole sequences."""
        return False


@dataclass(frozen=True, kw_only=True)
class BertClassifierConfig(TextClassifierConfig, BertConfig):
    """BERT with a head that classifies texts, in place of the heads of its pretraining.

    Example: `mj.with_text_head(mj.bert("base"), mj.ClassHeadConfig(classes=3))`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:BertClassifier"
    head: TextHead
    """What is predicted."""


@dataclass(frozen=True, kw_only=True)
class DecoderClassifierConfig(TextClassifierConfig, DecoderConfig):
    """A decoder with a head that classifies texts, in place of the one that predicts the next token.

    Example: `mj.with_text_head(mj.llama3("8b"), mj.ClassHeadConfig(classes=2, pooling="last"))`
    """

    target: ClassVar[str] = "megajax.models.classifier.module:DecoderClassifier"
    head: TextHead
    """What is predicted."""


def scoring(model: Any) -> Any:
    """The model with the same score of one sequence where it compares several; other models as they are."""
    if not isinstance(model, TextClassifierConfig) or not isinstance(head := model.head, ChoiceHeadConfig):
        return model
    score = RegressionHeadConfig(pooling=head.pooling, pooler=head.pooler, dropout=head.dropout, bias=head.bias)
    return replace(model, head=score)


def with_text_head(model: BertConfig | DecoderConfig, head: TextHead) -> BertClassifierConfig | DecoderClassifierConfig:
    """The model with this head in place of its own.

    Example: `mj.with_text_head(mj.bert("base"), mj.ClassHeadConfig(classes=3))`
    """
    cls = BertClassifierConfig if isinstance(model, BertConfig) else DecoderClassifierConfig
    return cls(head=head, **settings_of(model))
