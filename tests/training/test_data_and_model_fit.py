"""Data without the leaves of a model is refused when the config is read; the message names both sides."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from user_errors import user_error

import megajax as mj
from megajax.config import load
from megajax.config.errors import ConfigError
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import text_leaves

CASES = {
    "gpt3.py:debug data.type=LibrarySentences": (
        "LibrarySentencesConfig makes loss_mask (float32), tokens (int32)",
        "DecoderConfig reads tokens (int32), labels (int32), loss_mask (float32), positions (int32); "
        "missing: positions",
    ),
    "bert.py:debug data.type=Blend data.paths=a": (
        "BlendConfig makes tokens (int32), labels (int32), loss_mask (float32), positions (int32), "
        "padding (bool); BertConfig reads",
        "missing: segment_ids, token_types, is_random",
        "choose data that makes segment_ids and token_types and is_random, or another model",
    ),
    "bert.py:debug data.next_sentence=false": ("missing: is_random",),
    "t5.py:debug data.type=LibrarySentences": ("T5Config reads", "missing: encoder_tokens, encoder_segment_ids"),
}


@pytest.mark.parametrize("settings", CASES)
def test_the_message_names_both_sides(settings: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*settings.split())
    text = str(refused.value)
    assert all(part in text for part in CASES[settings]), text
    assert "1 problem in" in text


def test_evaluation_sets_have_the_leaves_that_the_model_reads() -> None:
    """A dense model reads no padding, which data of one's own may not make."""
    sets = "evaluation.sets={other: {type: MockConfig, isolate_documents: %s}}"
    isolated = "gpt3.py:debug", "data.type=Mock", "data.isolate_documents=true"
    assert load(*isolated, sets % "true").evaluation.sets
    with user_error("evaluation.sets.other", kind=ConfigError):
        load(*isolated, sets % "false")
    own = replace(load(*isolated), data=WithoutPadding())
    assert not own.but(evaluation=load(*isolated, sets % "true").evaluation).problems(1)


@dataclass(frozen=True)
class WithoutPadding:
    """Data of one's own."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def leaves(self) -> dict[str, str]:
        return {name: dtype for name, dtype in text_leaves(isolated=True).items() if name != "padding"}

    def build(self, **fields: Any) -> Any:
        raise NotImplementedError


def test_a_student_reads_the_padding_that_its_teacher_routes() -> None:
    student, teacher = mj.llama3("debug"), mj.mixtral("debug")
    teacher = replace(teacher, vocabulary_size=student.vocabulary_size, sequence_length=student.sequence_length)
    model = mj.with_teacher(student, teacher)
    assert "padding" in model.schema() and "padding" not in student.schema()


def test_sections_of_different_depth_are_rounded_whole() -> None:
    """First and last layers are the same numbers in all sections."""
    deeper = "t5.py:debug", "precision.compute=bfloat16", "model.encoder.repeats=4"
    assert load(*deeper, "precision.matmul=Fp8Current").precision.matmul is not None
    with user_error("precision.matmul", kind=ConfigError):
        load(*deeper, "precision.matmul=Nvfp4")
