"""Rows of streamed text beside `datasets` and torch's DataLoader."""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.data.loading import loader_of
from benchmarks.outcome import rounded
from benchmarks.training.peers import demand_torch, run, torch_environment
from megajax.config.optional_packages import require
from megajax.data.configs import StreamConfig
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.splits import Rows
from megajax.data.text.standard_library import library_root, select_files
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import HuggingFaceTokenizerConfig

END = "<|endoftext|>"
GROUP = 5
"""Documents of a row group: the last groups of lanes are tokenized, and only in part used."""


def streams(
    *,
    torch_python: Path = Path(sys.executable),
    megabytes: float = 8.0,
    sequence_length: int = 1024,
    rows: int = 8,
    rounds: int = 3,
) -> dict[str, Any]:
    """Rows of streamed Parquet per processor second, beside datasets and torch's DataLoader in the same run.

    The text is the source of Python's standard library in four Parquet files, and the tokenizer a byte-level BPE of
    8,192 tokens trained on it, the same file for both. Each reads the text once, tokenizes it, packs it into rows of
    `sequence_length` tokens without padding, and makes batches of `rows`: MegaJAX with data.type=Stream and its loader,
    the other with load_dataset(streaming=True), a buffer of 1,000 documents to shuffle, map(batched=True) and a
    DataLoader without workers. Both run on one core, by turns, in a new process each time, because a tokenizer is
    slower in memory that was used and freed; before, each tokenizes the text once, which fills its cache of words.
    Processor seconds count, so other load matters little. Without a shuffle their first rows must be equal; otherwise
    the exit code is 1.

    --torch-python: the Python that has torch, datasets and tokenizers. --rounds: the median of their ratios counts.

    Raises UserError if there is no torch.
    """
    demand_torch(torch_python)
    os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # processes inherit the core
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, megabytes)
        tokens = sum(map(len, map(tokenizer_config(folder).build().encode, all_texts(folder))))
        ours, theirs, equal = list[float](), list[float](), True
        for turn in range(rounds):
            results = []
            for python, name in ((Path(sys.executable), "streams"), (torch_python, "datasets_baseline")):
                out = folder / f"{name}-{turn}.json"
                numbers = map(str, (sequence_length, rows, tokens))
                program = [str(python), "-m", f"benchmarks.data.{name}", str(folder), str(out), *numbers]
                run(program, name, environment=torch_environment(), seconds=900)
                results.append(json.loads(out.read_text()))
            equal = equal and results[0]["first"] == results[1]["first"]
            ours.append(results[0]["rows_per_second"])
            theirs.append(results[1]["rows_per_second"])
    ratios = [own / their for own, their in zip(ours, theirs, strict=True)]
    figures = {"rows_per_processor_second": ours, "datasets_rows_per_processor_second": theirs}
    return rounded(figures | {"ratio": statistics.median(ratios), "equal_work": equal}) | {"wrong": not equal}


def write_text(folder: Path, megabytes: float) -> None:
    """Parquet files, and the tokenizer."""
    arrow, tokenizers = require("pyarrow", "This benchmark"), require("tokenizers", "This benchmark")
    parquet = require("pyarrow.parquet", "This benchmark")
    files = select_files(megabytes, 0)
    texts = [(library_root() / name).read_bytes().decode("utf-8", "replace") for name, _ in files]
    for part in range(4):
        parquet.write_table(arrow.table({"text": texts[part::4]}), folder / f"{part}.parquet", row_group_size=GROUP)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[: len(texts) // 4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def tokenizer_config(folder: Path) -> HuggingFaceTokenizerConfig:
    """The tokenizer."""
    return HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json"), eod=END, special_tokens_in_text=False)


def main() -> None:
    """Rows per processor second of one pass, and the first tokens without a shuffle, into a file.

    Arguments: those of datasets_baseline.py, and the number of tokens of the text.
    """
    folder, out, (length, rows, tokens) = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:6])
    tokenizer, schema = tokenizer_config(folder).build(), text_schema(length, 2**31)
    options: dict[str, Any] = {"paths": (str(folder / "*.parquet"),), "cache_dir": f"{out}.cache"}

    def source(count: int, **settings: Any) -> Any:
        data = StreamConfig(**options, **settings)
        splits = data.build(tokenizer=tokenizer, schema=schema, rows=Rows(count), seed=1)
        splits.train.sequence_length = length
        return splits.train

    first = source(1, lanes=1, shuffle=False)[0]["tokens"]
    for text in all_texts(folder):  # fills the cache of words, as the first batch of the other does
        tokenizer.encode(text)
    batches = tokens // length // rows - 2 * rows  # a lane may end before the others
    rows_of_pass = source(batches * rows + rows, lanes=rows)
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # starts jax
    with loader_of(rows_of_pass, rows, LoaderConfig()) as loader:
        began = time.process_time()
        for _ in range(batches):
            np.asarray(next(loader)[0]["tokens"])
        spent = time.process_time() - began
    out.write_text(json.dumps({"rows_per_second": batches * rows / spent, "first": first.tolist()}))


def all_texts(folder: Path) -> list[str]:
    """The documents."""
    parquet = require("pyarrow.parquet", "This benchmark")
    files = sorted(folder.glob("*.parquet"))
    return [text for file in files for text in parquet.read_table(file).column("text").to_pylist()]


if __name__ == "__main__":
    main()
