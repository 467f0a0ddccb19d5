"""Synthetic files in the formats of GLUE, RACE and SQuAD, for laptops and tests; easy to learn."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megajax.data.language_benchmarks.config import GLUE

WORDS = ("a", "cat", "dog", "tree", "house", "river", "sees", "likes", "finds", "old", "red", "small", "near", "under")
SIZES = {"train": 400, "dev": 80, "test": 40}
"""Examples per file."""
MARKS = ("X", "Y", "Z", "Q", "J", "K")
"""Words that indicate the classes."""
ANSWERS = ("blue", "green", "white", "black")

type Write = Callable[[Path], None]


def write_glue(folder: Path, task: str) -> Path:
    """The files of a task; the first word of the last text indicates the class. Returns the folder."""
    form = GLUE[task]
    texts = [form.first] if form.second is None else [form.first, form.second]

    def write(place: Path) -> None:
        files = [("train", "train.tsv"), *(("dev", name) for _, name in form.validation)]
        for number, (split, name) in enumerate([*files, *(("test", name) for _, name in form.test)]):
            rng, labelled = np.random.default_rng(number), split != "test"
            columns = list(form.columns if labelled and form.columns else ["index", *texts, *[form.label] * labelled])
            lines = [] if labelled and form.columns else ["\t".join(columns)]
            for row in range(SIZES[split]):
                label = int(rng.integers(len(form.classes) or len(MARKS)))
                cells = dict.fromkeys(columns, "") | {"index": str(row), **{text: _random_text(rng) for text in texts}}
                cells[texts[-1]] = f"{MARKS[label]} {cells[texts[-1]]}"
                cells[form.label] = form.classes[label] if form.classes else f"{label:.1f}"
                lines.append("\t".join(cells[column] for column in columns))
            (place / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    return _write_once(folder, write)


def write_race(folder: Path) -> Path:
    """The files of all splits; the right option begins with "Y", the others with "N". Returns the folder."""

    def write(place: Path) -> None:
        for number, (split, count) in enumerate(SIZES.items()):
            rng = np.random.default_rng(number)
            for row in range(count // 2):
                group = place / split / ("middle", "high")[row % 2]
                group.mkdir(parents=True, exist_ok=True)
                answers = rng.integers(4, size=2).tolist()
                article = {
                    "article": f"{_random_text(rng)}.\n{_random_text(rng)}.",
                    "questions": [f"What {_random_text(rng, 2)}?", f"{_random_text(rng, 2)} _ ."],
                    "options": [
                        [f"{'Y' if option == answer else 'N'} {_random_text(rng, 2)}" for option in range(4)]
                        for answer in answers
                    ],
                    "answers": ["ABCD"[answer] for answer in answers],
                    "id": f"{row}.txt",
                }
                (group / f"{row}.txt").write_text(json.dumps(article) + "\n", encoding="utf-8")

    return _write_once(folder, write)


def write_squad(folder: Path, version: str) -> Path:
    """Training and development files; the answer follows "=". Questions without "=" have no answer."""

    def write(place: Path) -> None:
        for number, split in enumerate(("train", "dev")):
            rng, paragraphs = np.random.default_rng(number), []
            for row in range(SIZES[split]):
                answered = version != "2.0" or row % 4 > 0
                before, answer = _random_text(rng, int(rng.integers(1, 5))), str(rng.choice(ANSWERS))
                context = f"{before} {'=' if answered else 'or'} {answer} {_random_text(rng, 2)}."
                answers = [{"text": answer, "answer_start": context.index(answer, len(before))}] * answered
                question: dict[str, Any] = {"id": f"{split}{row}", "question": "Which colour?", "answers": answers}
                if version == "2.0":
                    question["is_impossible"] = not answered
                paragraphs.append({"context": context, "qas": [question]})
            content = {"version": version, "data": [{"title": "colours", "paragraphs": paragraphs}]}
            (place / f"{split}-v{version}.json").write_text(json.dumps(content), encoding="utf-8")

    return _write_once(folder, write)


def _random_text(rng: np.random.Generator, count: int = 4) -> str:
    return " ".join(rng.choice(WORDS, count).tolist())


def _write_once(folder: Path, write: Write) -> Path:
    """The folder, written unless it exists. Concurrent processes write equal content."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        write(Path(temporary))
        with suppress(OSError):  # another process was first
            Path(temporary).rename(folder)
    return folder
