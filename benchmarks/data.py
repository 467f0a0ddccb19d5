"""Speed of finding, reading and batching rows and putting them on devices, and the fill of packed conversations.

Run:  python benchmarks/data.py [--tokens=60000000] [--sequence-length=2048] [--rows=32]

Writes a token file of random documents into a temporary folder. Times each part separately, the whole path from file to
device, and the wait of a step for its batch while the device is busy. Prints JSON and writes it to
benchmarks/results/data.json.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import outcome
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megajax.batch import SAMPLE, Leaf
from megajax.data.configs import BlendConfig, ChatConfig, LoaderConfig, MockConfig, Rows
from megajax.data.rows.blend import weighted_index
from megajax.data.rows.loader import Loader
from megajax.data.rows.packing import best_fit
from megajax.data.text.gpt_index import IndexRequest, build_index
from megajax.data.text.indexed_dataset import IndexedTokens, IndexedWriter
from megajax.models.configs import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig

VOCABULARY = 50_000
REPEATS = 3


def seconds(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Shortest of a few runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def write_corpus(prefix: Path, tokens: int) -> None:
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        remaining = tokens
        while remaining > 0:
            document = random.integers(0, VOCABULARY - 1, int(random.integers(50, 3000)), dtype=np.uint16)
            writer.add_document([document])
            remaining -= len(document)


def index_speed(sequence_length: int) -> dict[str, float]:
    """Two million documents, read three times over; and a blend of twenty datasets."""
    lengths = np.random.default_rng(0).integers(50, 3000, 2_000_000).astype(np.int32)
    epoch = int(lengths.sum(dtype=np.int64))
    request = IndexRequest(
        first=0, last=len(lengths), rows=3 * epoch // sequence_length - 1, sequence_length=sequence_length, seed=1
    )
    index_seconds = seconds(lambda: build_index(lengths, request, "benchmark"), 2)
    weights = np.random.default_rng(0).random(20).tolist()
    return {
        "index_tokens": 3 * epoch,
        "index_seconds": index_seconds,
        "index_tokens_per_second": 3 * epoch / index_seconds,
        "blend_rows_per_second": 1_000_000 / seconds(lambda: weighted_index(weights, 1_000_000), 1),
    }


def loader_of(source: Any, rows: int, config: LoaderConfig) -> Loader:
    """Batches of `rows` rows on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    text = text_schema(source.sequence_length, 2**31)
    schema = {**{name: leaf for name, leaf in text.items() if name in source[0]}, SAMPLE: Leaf("uint32")}
    shardings = dict.fromkeys(schema, NamedSharding(mesh, PartitionSpec(None, "data")))
    return Loader(source, global_size=rows, microbatches=1, schema=schema, shardings=shardings, config=config)


def batch_speed(source: Any, rows: int, steps: int, config: LoaderConfig) -> float:
    """Tokens a second from the source to ready arrays on the devices, nothing else going on."""
    with loader_of(source, rows, config) as loader:
        jax.block_until_ready(next(loader))

        def run() -> None:
            for _ in range(steps // REPEATS):
                batch, _ = next(loader)
                jax.block_until_ready(batch)

        passed = seconds(run)
    return steps // REPEATS * rows * source.sequence_length / passed


def data_wait(source: Any, rows: int, steps: int, busy: float) -> float:
    """Mean milliseconds that a step waits for its batch when each step keeps the host free for `busy` seconds."""
    waited = 0.0
    with loader_of(source, rows, LoaderConfig()) as loader:
        next(loader)
        for _ in range(steps):
            time.sleep(busy)
            start = time.perf_counter()
            next(loader)
            waited += time.perf_counter() - start
    return 1000 * waited / steps


def chat_speed(length: int, folder: Path) -> dict[str, float]:
    """20,000 conversations of 2 to 6 messages, by the byte tokenizer; then 10^6 lengths packed alone.

    Lengths are log-normal, as those of chats are; a tenth of the conversations is longer than half a row.
    """
    draw = np.random.default_rng(0)
    count, path = 20_000, folder / "chats.jsonl"
    with path.open("w") as file:
        for size in draw.lognormal(np.log(length / 6), 0.85, count).clip(20, 0.9 * length).astype(int).tolist():
            turns = int(draw.integers(1, 4))
            roles = ["user", "assistant"] * turns
            talk = [{"role": role, "content": "word " * (size // (10 * turns))} for role in roles]
            file.write(json.dumps({"messages": talk}) + "\n")
    config = ChatConfig(paths=(str(path),), split="1", cache_dir=str(folder / "chats"), on_error="skip")
    tokenizer, schema = ByteTokenizerConfig().build(), text_schema(length, 257)
    start = time.perf_counter()
    rows = config.build(tokenizer=tokenizer, schema=schema, rows=Rows(None), seed=1).train
    build_seconds = time.perf_counter() - start
    cached = seconds(lambda: config.build(tokenizer=tokenizer, schema=schema, rows=Rows(None), seed=1))
    lengths = draw.lognormal(np.log(length / 6), 0.85, 1_000_000).clip(20, length).astype(int)
    sample_rows = min(2000, len(rows))
    return {
        "chat_packing_share": rows.packing.fill,
        "chat_conversations_built_per_second": count / build_seconds,
        "chat_conversations_from_cache_per_second": count / cached,
        "chat_rows_per_second": sample_rows / seconds(lambda: [rows[row] for row in range(sample_rows)]),
        "packing_conversations_per_second": len(lengths) / seconds(lambda: best_fit(lengths, length), 1),
        "packing_share": lengths.sum() / (length * len(best_fit(lengths, length))),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    length, rows = arguments.sequence_length, arguments.rows
    start = time.perf_counter()
    write_corpus(folder / "corpus", arguments.tokens)
    write_seconds = time.perf_counter() - start
    tokenizer = SimpleNamespace(vocabulary_size=VOCABULARY, eod=VOCABULARY - 1, pad=None, identity="benchmark")
    request = Rows(arguments.tokens // length - rows)
    results: dict[str, Any] = {"write_tokens_per_second": arguments.tokens / write_seconds}
    results["open_and_check_seconds"] = seconds(lambda: IndexedTokens(folder / "corpus"))
    results |= index_speed(length) | chat_speed(length, folder)
    for name, options in {"rows": {}, "rows_isolated": {"isolate_documents": True}}.items():
        config = BlendConfig(paths=(str(folder / "corpus"),), split="1", cache_dir=str(folder / "cache"), **options)
        source = config.build(tokenizer=tokenizer, schema=text_schema(length, 2**31), rows=request, seed=1).train
        count = min(2000, len(source))
        elapsed = seconds(lambda source=source, count=count: [source[row] for row in range(count)])
        results[f"{name}_tokens_per_second"] = count * length / elapsed
        steps = min(600, len(source) // rows - 8)
        for threads in (1, 2, 4):
            speed = batch_speed(source, rows, steps, LoaderConfig(threads=threads))
            results[f"{name}_to_device_{threads}_threads_tokens_per_second"] = speed
    mock = (
        MockConfig().build(tokenizer=tokenizer, schema=text_schema(length, 2**31), rows=Rows(rows * 620), seed=1).train
    )
    results["mock_to_device_tokens_per_second"] = batch_speed(mock, rows, 600, LoaderConfig())
    results["data_wait_ms_at_20_ms_steps"] = data_wait(source, rows, 100, 0.02)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        results = measure(arguments, Path(folder))
    settings = {"tokens": arguments.tokens, "sequence_length": arguments.sequence_length, "rows": arguments.rows}
    outcome.write("data", settings | {name: float(f"{value:.4g}") for name, value in results.items()})


if __name__ == "__main__":
    main()
