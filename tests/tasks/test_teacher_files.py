"""Files of a teacher's likeliest tokens: written once, resumed, aligned with the tokens of every row, and refusals."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import token_files

from megajax.config.errors import UserError
from megajax.data.rows.splits import Rows
from megajax.data.text.config import TeacherFilesConfig
from megajax.data.text.teacher_files import TeacherWriter, build_splits, teacher_path
from megajax.models.distilled.config import TopKDistillationConfig, with_stored_teacher
from megajax.models.presets.llama import llama3
from megajax.tasks.config import TeacherTaskConfig
from megajax.tasks.teacher_files import StoredTeacher
from megajax.training.scoring import Window

LENGTH, K, VOCABULARY = 16, 3, 100


@dataclass
class Teacher:
    """In place of a Scorer: expects at each place the numbers that follow the sum of what it has read."""

    weight: float = 1.0
    tokenizer: Any = field(default_factory=token_files.tokenizer)
    length: int = LENGTH
    batches: int = 0

    def __post_init__(self) -> None:
        model = SimpleNamespace(
            vocabulary_size=VOCABULARY, schema=lambda: {"tokens": SimpleNamespace(below=VOCABULARY)}
        )
        cfg = SimpleNamespace(model=model, precision=SimpleNamespace(compute="float32"))
        self.program = SimpleNamespace(cfg=cfg, declared={"w": SimpleNamespace(layers=())})
        self.weights = {"w": jnp.full(3, self.weight)}

    def rows_at_once(self, length: int) -> int:
        return 1

    def progress(self, count: int, total: int) -> None:
        pass

    def likeliest(self, windows: list[Window], count: int, temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
        self.batches += 1
        return [expected(window, count) for window in windows]


def expected(window: Window, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What the teacher expects at the counted tokens of a window."""
    sums = np.cumsum(window.tokens[:-1])[-window.counted :, None]
    log_p = np.log(np.array([*2.0 ** -np.arange(1, k + 1), 2.0**-k], np.float32))
    return (sums + np.arange(k)) % VOCABULARY, np.tile(log_p, (window.counted, 1))


def write(prefix: Path, teacher: Teacher | None = None, **settings: Any) -> Any:
    config = TeacherTaskConfig(**{"paths": (str(prefix),), "k": K, **settings})
    return StoredTeacher(config, teacher or Teacher())()  # ty: ignore[invalid-argument-type]


def corpus(folder: Path, seed: int = 0) -> Path:
    return token_files.write_random(folder / f"text{seed}", documents=60, seed=seed)


def splits(prefix: Path, tokenizer: Any = None, loss: TopKDistillationConfig | None = None, **settings: Any) -> Any:
    model = with_stored_teacher(
        llama3("debug", sequence_length=LENGTH, vocabulary_size=VOCABULARY), loss or TopKDistillationConfig(k=K)
    )
    config = TeacherFilesConfig(paths=(str(prefix),), cache_dir=str(prefix.parent), **settings)
    tokenizer = tokenizer or token_files.tokenizer()
    return build_splits(config, tokenizer=tokenizer, schema=model.schema(), rows=Rows(30, 5), seed=1)


@pytest.mark.parametrize("extra", [True, False])
def test_rows_have_the_records_of_their_tokens(extra: bool, tmp_path: Path) -> None:
    """Rows of shuffled documents: the teacher has read each from its start, in windows of a row without overlap."""
    prefix = corpus(tmp_path)
    figures = write(prefix)
    for split in splits(prefix, isolate_documents=True, extra_token=extra)[:2]:
        for number in range(len(split)):
            row, pieces = split[number], split._pieces(number)
            ids, log_p = [], []
            for sequence, start, stop in pieces:
                text = split.tokens.sequence(sequence)
                of_text = np.full((len(text), K), -1)
                for first in range(0, len(text) - 1, LENGTH):
                    window = Window(text[first : first + LENGTH + 1], len(text[first : first + LENGTH + 1]) - 1)
                    of_text[first + 1 : first + 1 + window.counted] = expected(window, K)[0]
                ids.append(of_text[start:stop])
            ids = np.concatenate(ids)[1 : LENGTH + 1]
            ids = np.pad(ids, ((0, LENGTH - len(ids)), (0, 0)), constant_values=-1)
            np.testing.assert_array_equal(row["teacher_ids"], ids)
            log_p = np.where(ids[:, :1] < 0, 0, expected(Window(np.zeros(2, int), 1), K)[1])
            known = row["teacher_ids"][:, 0] >= 0
            np.testing.assert_allclose(row["teacher_log_p"][known], log_p[known], rtol=1e-6)
            if extra:  # the first token of a document is the only one that the teacher does not expect
                starts = np.append(np.diff(row["segment_ids"]) > 0, False)
                np.testing.assert_array_equal(known[:-1], ~starts[:-1])
    assert figures["tokens"].value == figures["written"].value + 60
    assert figures["share"].value == pytest.approx(1 - 2.0**-K)


def test_a_smaller_k_adds_the_rest_to_the_others(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    write(prefix)
    row = splits(prefix, loss=TopKDistillationConfig(k=1)).train[0]
    known = row["teacher_ids"][:, 0] >= 0
    assert row["teacher_ids"].shape == (LENGTH, 1) and known.any()
    np.testing.assert_allclose(np.exp(row["teacher_log_p"][known]), 0.5, rtol=1e-6)


def test_an_interrupted_file_goes_on_and_is_not_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, other, add = corpus(tmp_path / "a"), corpus(tmp_path / "b"), TeacherWriter.add
    write(other)

    def interrupted(writer: TeacherWriter, ids: np.ndarray, log_p: np.ndarray) -> None:
        if writer.records:
            with writer.path.open("ab") as file:
                file.write(b"half a rec")  # what a kill in the middle of a write leaves
            raise KeyboardInterrupt
        add(writer, ids, log_p)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherWriter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(prefix)
    with pytest.raises(UserError, match=r"text0.teacher: has \d+ of [\d,]+ records: give the command"):
        splits(prefix)
    assert 0 < write(prefix)["written"].value < write(other)["tokens"].value
    assert teacher_path(prefix, None).read_bytes() == teacher_path(other, None).read_bytes()
    again = Teacher()
    assert write(prefix, again)["written"].value == again.batches == 0


def test_refusals(tmp_path: Path) -> None:
    """Each names the two values."""
    prefix, other = corpus(tmp_path), corpus(tmp_path, seed=1)
    with pytest.raises(UserError, match=r"text0.teacher.json: cannot be read: No such file.*--tasks=teacher:PREFIX"):
        splits(prefix)
    write(prefix)
    with pytest.raises(UserError, match=r"text0.teacher: exists, with teacher \w+, not \w+: delete it"):
        write(prefix, Teacher(weight=2.0))
    with pytest.raises(
        UserError, match=r"written with tokenizer test:100:None, and this run needs tokenizer test:100:7"
    ):
        splits(prefix, tokenizer=token_files.tokenizer(pad=7))
    with pytest.raises(UserError, match=r"with k 3, and this run needs k 4 or more: lower model.distillation.k"):
        splits(prefix, loss=TopKDistillationConfig(k=4))
    with pytest.raises(UserError, match=r"with temperature 1.0, and this run needs temperature 2.0"):
        splits(prefix, teacher_temperature=2.0)
    for name in ("teacher", "teacher.json"):
        (tmp_path / f"text0.{name}").replace(tmp_path / f"text1.{name}")
    with pytest.raises(
        UserError, match=r"text1.teacher: was written with data \w+, and this run needs data \w+ .*token"
    ):
        splits(other)
    with pytest.raises(UserError, match=r"k=101 is more than the 100 token ids"):
        write(prefix, k=101)


def test_problems_of_configs() -> None:
    student = llama3("debug", sequence_length=LENGTH, vocabulary_size=VOCABULARY)
    model = with_stored_teacher(student, TopKDistillationConfig(k=VOCABULARY + 1))
    assert [problem.setting for problem in replace(model, z_loss=0.1).problems()] == ["z_loss", "distillation.k"]
    assert [problem.setting for problem in TopKDistillationConfig(k=0).problems()] == ["k"]
