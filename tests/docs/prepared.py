"""What the pages expect a user to have: texts, token files, runs, a vocabulary, a Megatron-LM script."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.docs.blocks import ROOT

LINES = [
    f"{index}: It is the same, said {name}, and went on."
    for index in range(200)
    for name in ("Ada", "Blaise", "Carl", "Dana")
]


def _corpus(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES), encoding="utf-8")


def _megatron_script(folder: Path) -> None:
    shutil.copy(ROOT / "tests/tools/gpt3_175b.sh", folder / "pretrain_gpt3_175b.sh")


def _shards_and_vocabulary(folder: Path) -> None:
    import tokenizers
    import zstandard

    (folder / "corpus").mkdir()
    for shard in range(2):
        text = "".join(json.dumps({"text": line}) + "\n" for line in LINES[shard::2])
        (folder / f"corpus/{shard}.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=400, special_tokens=["<|endoftext|>"])
    made.save_model(str(folder))


def _finished_run(folder: Path) -> None:
    words = [sys.executable, "-m", "megajax.train", "--config=quickstart.py", "--steps=3", "--evaluation.batches=1"]
    subprocess.run([*words, "--run_dir=runs/one"], cwd=folder, check=True, capture_output=True)


PREPARED: dict[str, tuple[Callable[[Path], None], ...]] = {
    "README.md": (_corpus, _megatron_script),
    "docs/checkpoints.md": (_finished_run,),
    "docs/data.md": (_corpus,),
    "docs/preprocess.md": (_shards_and_vocabulary,),
}
"""By page: what is written into its folder before its first command."""

PRELUDES: dict[str, str] = {}
"""By page: Python that comes before each of its programs, which only show the lines that matter."""


def prepare(page: str, folder: Path) -> None:
    for write in PREPARED.get(page, ()):
        write(folder)
