"""GLUE, RACE and SQuAD: rows of hand-written files, and errors for invalid files."""

import json
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.batch import Leaf
from megajax.data.language_benchmarks import glue, race, squad
from megajax.data.language_benchmarks.config import (
    GLUE,
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.language_benchmarks.features import SequenceBuilder, clean_text, truncate_pair
from megajax.data.rows.splits import Rows
from megajax.tokenizers.config import ByteTokenizerConfig, WordPieceTokenizerConfig

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "dog", "ran", "##s", ".", "a", "who", "?")
CLS, SEP = 2, 3


def schema(length: int, choices: int = 1, classes: int | None = None) -> dict[str, Leaf]:
    shape, axes = ((length,), ("seq",)) if choices == 1 else ((choices, length), (None, "seq"))
    return {"tokens": Leaf("int32", shape, axes), "labels": Leaf("int32", below=classes)}


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return WordPieceTokenizerConfig(vocabulary=str(path)).build()


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_pair_has_the_marks_and_types_and_padding_of_BERT(word_tokenizer):
    row = SequenceBuilder(word_tokenizer, schema(12))(np.array(ids("the cat")), np.array(ids("dog ran .")))
    expected = [CLS, *ids("the cat"), SEP, *ids("dog ran ."), SEP]
    assert row["tokens"].tolist() == [*expected, 0, 0, 0, 0]
    assert row["token_types"].tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert row["segment_ids"].tolist() == [1] * 8 + [0] * 4
    single = SequenceBuilder(word_tokenizer, schema(8))(np.array(ids("the cat sat the cat sat the cat")))
    assert single["tokens"].tolist() == [CLS, *ids("the cat sat the cat sat"), SEP] and not single["token_types"].any()


def test_without_cls_and_sep_the_end_of_document_is_used():
    row = SequenceBuilder(ByteTokenizerConfig().build(), schema(8))(np.array([5, 6]), np.array([7]))
    assert row["tokens"].tolist() == [256, 5, 6, 256, 7, 256, 256, 256]
    with user_error():
        SequenceBuilder(ByteTokenizerConfig().build(), schema(7))


def test_the_longer_text_loses_its_last_tokens():
    for first in range(9):
        for second in range(9):
            for room in range(1, 13):
                a, b = list(range(first)), list(range(second))
                while len(a) + len(b) > room:
                    (a if len(a) > len(b) else b).pop()
                truncated = truncate_pair(room, np.arange(first), np.arange(second))
                assert [part.tolist() for part in truncated] == [a, b], (first, second, room)


def test_texts_are_cleaned_as_by_megatron():
    assert clean_text("One .\nTwo   . Three .") == "One. Two. Three ."


MNLI = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"


def test_columns_follow_the_header(word_tokenizer, tmp_path):
    lines = '0\tx\t"the cat\tthe dogs\tneutral\tentailment\n1\tx\ta\tcat\tneutral\t-\n'
    write_text(tmp_path / "train.tsv", MNLI + lines)
    config, reads = GlueConfig(task="mnli", path=str(tmp_path)), schema(12, classes=3)
    splits = glue.build_splits(config, tokenizer=word_tokenizer, schema=reads, rows=Rows(5), seed=1)
    row = splits.train[0]
    quote = [WORDS.index("[UNK]")]
    assert row["tokens"][:9].tolist() == [CLS, *quote, *ids("the cat"), SEP, *ids("the dog ##s"), SEP]
    assert (row["labels"], row["loss_mask"]) == (GLUE["mnli"].classes.index("entailment"), 1)
    assert len(splits.train) == splits.train.passes == 5 and dict(splits.train.skipped) == {"no label": 1}
    assert splits.valid is None and splits.test is None


def test_every_task_reads_the_files_of_its_form(word_tokenizer, tmp_path):
    for task, form in GLUE.items():
        config = MockGlueConfig(task=task, path=str(tmp_path))
        makes, reads = config.leaves(), schema(32, classes=len(form.classes) or None)
        splits = glue.build_splits(config, tokenizer=word_tokenizer, schema=reads, rows=Rows(3, 2, 0), seed=1)
        for split in (splits.train, splits.valid):
            assert {name: str(leaf.dtype) for name, leaf in split[0].items()} == dict(makes)
        assert len(glue.read_split(config, "validation", word_tokenizer, reads)) == len(form.validation)
        unlabelled = glue.read_split(config, "test", word_tokenizer, reads)[""]
        assert len(unlabelled) == 40 and unlabelled[0]["loss_mask"] == 0
    assert (tmp_path / "cola" / "train.tsv").read_text().count("\t\t\n") == 0


def read_glue(task: str, text: str, tokenizer, folder: Path):
    """The labelled examples of a file."""
    write_text(folder / "train.tsv", text)
    return glue.read_file(GlueConfig(task=task, path=str(folder)), "train.tsv", tokenizer, schema(12), labelled=True)


ACCEPTABILITY = "gj04\t1\t\tthe cat sat .\ngj04\t0\t*\tsat the .\n"
PARAPHRASES = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tthe cat\ta cat\r\n"


@pytest.mark.parametrize(
    ("task", "text", "expected"),
    [
        ("cola", ACCEPTABILITY, [("the cat sat .", None, 1), ("sat the .", None, 0)]),
        ("mrpc", PARAPHRASES, [("the cat", "a cat", 1)]),
    ],
)
def test_acceptability_has_no_header_and_paraphrases_a_byte_order_mark(task, text, expected, word_tokenizer, tmp_path):
    examples = read_glue(task, text, word_tokenizer, tmp_path)
    assert [(item.first, item.second, item.label) for item in examples.items] == expected


def test_malformed_rows_of_questions_are_counted(word_tokenizer, tmp_path):
    header, line = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\twho ?\tthe cat ?\t1"
    malformed = ["1\t2\t3\twho", "ran?\t0", "2\t3\t4\t\twho ?\t0"]
    examples = read_glue("qqp", "\n".join([header, line, *malformed]), word_tokenizer, tmp_path)
    assert len(examples) == 1 and dict(examples.skipped) == {"malformed": 3}


LABELLED, SCORED = (f"index\tsentence1\tsentence2\t{name}\n" for name in ("label", "score"))


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("rte", LABELLED + "0\ta\tb\n"),
        ("rte", LABELLED.replace("e2", "e_2")),
        ("rte", LABELLED + "0\ta\tb\tmaybe\n"),
        ("rte", LABELLED + "0\ta\t \tentailment\n"),
        ("rte", LABELLED),
        ("stsb", SCORED + "0\ta\tb\t5.1\n"),
        ("stsb", SCORED + "0\ta\tb\tnan\n"),
    ],
)
def test_errors_name_the_file_and_line(task, text, word_tokenizer, tmp_path):
    with user_error():
        read_glue(task, text, word_tokenizer, tmp_path)


def test_missing_files_and_other_numbers_of_classes_are_refused(word_tokenizer, tmp_path):
    def build(classes: int) -> None:
        reads = schema(12, classes=classes)
        config = GlueConfig(task="rte", path=str(tmp_path))
        glue.build_splits(config, tokenizer=word_tokenizer, schema=reads, rows=Rows(1), seed=1)

    with user_error():
        build(2)
    with user_error():
        build(3)
    (tmp_path / "train.tsv").write_bytes(b"index\xff")
    with user_error():
        build(2)


ARTICLE = {
    "article": "the cat\nsat .",
    "questions": ["who ran ?", "the _ sat _ ."],
    "options": [["cat", "dog", "a dog", "the dogs"], ["cat", "dog", "a", "the"]],
    "answers": ["B", "D"],
}


def test_options_fill_the_gap_or_follow_the_question(word_tokenizer, tmp_path):
    write_text(tmp_path / "train/high/1.txt", json.dumps(ARTICLE))
    examples = race.read_split(RaceConfig(path=str(tmp_path)), "train", word_tokenizer, schema(20, choices=4))
    assert [(item.group, item.identifier, item.label) for item in examples.items] == [
        ("high", "high/1.txt", n) for n in (1, 3)
    ]
    row = examples[0]
    tail = [SEP, *ids("the cat sat ."), SEP]
    assert row["tokens"].shape == (4, 20)
    assert row["tokens"][2][:12].tolist() == [CLS, *ids("who ran ? a dog"), *tail]
    assert examples[1]["tokens"][3][:12].tolist() == [CLS, *ids("the the sat the ."), *tail]
    assert row["labels"] == 1 and row["segment_ids"].sum(-1).tolist() == [11, 11, 12, 13]
    short = RaceConfig(path=str(tmp_path), longest_question=2)
    row = race.read_split(short, "train", word_tokenizer, schema(20, choices=4))[0]
    assert row["tokens"][0][:4].tolist() == [CLS, *ids("who ran"), SEP]


@pytest.mark.parametrize(
    "change",
    [
        {"answers": ["B"]},
        {"answers": ["B", "E"]},
        {"options": [["a"], ["a"]]},
        {"article": 3},
    ],
)
def test_errors_in_articles(change, word_tokenizer, tmp_path):
    write_text(tmp_path / "dev/1.txt", json.dumps({**ARTICLE, **change}))
    with user_error():
        race.read_split(RaceConfig(path=str(tmp_path)), "validation", word_tokenizer, schema(20, choices=4))


def test_unsuitable_folders_and_models(word_tokenizer, tmp_path):
    config = RaceConfig(path=str(tmp_path))
    with user_error():
        race.read_split(config, "train", word_tokenizer, schema(20))
    with user_error():
        race.read_split(config, "train", word_tokenizer, schema(20, choices=4))
    write_text(tmp_path / "train/1.txt", "{\n")
    with user_error():
        race.read_split(config, "train", word_tokenizer, schema(20, choices=4))
    write_text(tmp_path / "train/1.txt", '{"article": ""}\n')
    with user_error():
        race.read_split(config, "train", word_tokenizer, schema(20, choices=4))


def questions(*questions_and_answers: dict, context: str) -> str:
    paragraph = {"context": context, "qas": questions_and_answers}
    return json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]})


def question(identifier: str, answer: str | None, start: int = 0) -> dict:
    answers = [] if answer is None else [{"text": answer, "answer_start": start}]
    return {"id": identifier, "question": "who?", "answers": answers, "is_impossible": answer is None}


def test_windows_cover_a_paragraph_and_know_their_answers(word_tokenizer, tmp_path):
    context = "the cat. the dogs  ran. the cat sat"
    text = questions(question("one", "dogs", 13), question("two", None), question("off", "sat", 2), context=context)
    write_text(tmp_path / "train-v2.0.json", text)
    config = SquadConfig(path=str(tmp_path), stride=3)
    examples = squad.read_split(config, "train", word_tokenizer, schema(10))
    windows = [window for window in examples.items if window.question.identifier == "one"]
    assert dict(examples.skipped) == {"answer not at its place": 1}
    # 11 tokens of the paragraph, 5 beside the question and three marks.
    assert [(window.first, window.count) for window in windows] == [(0, 5), (3, 5), (6, 5)]
    row = examples[1]
    assert row["tokens"].tolist() == [CLS, *ids("who ?"), SEP, *ids("the dog ##s ran ."), SEP]
    assert row["token_types"].tolist() == [0] * 4 + [1] * 6
    assert [int(examples[n]["starts"]) for n in range(4)] == [0, 5, 0, 0]
    assert [int(examples[n]["ends"]) for n in range(4)] == [0, 6, 0, 0]
    spans = windows[0].question.paragraph.spans
    assert context[spans[4][0] : spans[5][1]] == "dogs"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        questions(question("a", None), question("a", None), context="a"),
        questions({"id": "a", "question": "?", "answers": []}, context="a"),
        questions({**question("a", "a"), "answers": [{"text": "a", "answer_start": "0"}]}, context="a"),
        questions({**question("a", "a"), "answers": []}, context="a"),
    ],
)
def test_errors_in_questions(text, word_tokenizer, tmp_path):
    write_text(tmp_path / "dev-v2.0.json", text)
    with user_error():
        squad.read_split(SquadConfig(path=str(tmp_path)), "validation", word_tokenizer, schema(12))


def test_synthetic_files_are_written_once_and_read(word_tokenizer, tmp_path):
    config = MockRaceConfig(path=str(tmp_path))
    assert len(race.read_split(config, "validation", word_tokenizer, schema(40, choices=4))) == 80
    assert config.folder() == tmp_path / "race" and not list(tmp_path.glob("tmp*"))
    for version, answered in (("1.1", {True}), ("2.0", {True, False})):
        config = MockSquadConfig(path=str(tmp_path), version=version)
        examples = squad.read_split(config, "train", word_tokenizer, schema(40))
        assert {bool(window.question.answers) for window in examples.items} == answered
        assert not examples.skipped["answer not at its place"]
