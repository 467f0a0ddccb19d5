"""Speed of finding, reading and batching rows, putting them on devices, and packing conversations."""

import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.outcome import rounded
from benchmarks.stopwatch import best
from megajax.batch import SAMPLE, Leaf
from megajax.data.chat.config import ChatConfig
from megajax.data.rows.blend import weighted_index
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.loader import Loader
from megajax.data.rows.packing import best_fit
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.gpt_index import IndexRequest, build_index
from megajax.data.text.indexed_dataset import IndexedTokens, IndexedWriter
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig

VOCABULARY = 50_000
REPEATS = 3


def data(*, tokens: int = 60_000_000, sequence_length: int = 2048, rows: int = 32) -> dict[str, Any]:
    """Speed of finding, reading and batching rows and putting them on devices, and the fill of packed conversations.

    Writes a token file of random documents into a temporary folder. Times each part separately, the whole path from
    file to device, and the wait of a step for its batch while the device is busy.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        figures = measure(tokens, sequence_length, rows, Path(folder))
    return {"tokens": tokens, "sequence_length": sequence_length, "rows": rows} | rounded(figures)


def measure(tokens: int, length: int, rows: int, folder: Path) -> dict[str, Any]:
    """All speeds."""
    write_seconds = best(lambda: write_documents(folder / "corpus", tokens, (50, 3000)), 1)
    tokenizer = SimpleNamespace(vocabulary_size=VOCABULARY, eod=VOCABULARY - 1, pad=None, identity="benchmark")
    build: dict[str, Any] = {"tokenizer": tokenizer, "schema": text_schema(length, 2**31), "seed": 1}
    figures: dict[str, Any] = {"write_tokens_per_second": tokens / write_seconds}
    figures["open_and_check_seconds"] = best(lambda: IndexedTokens(folder / "corpus"))
    figures |= index_speed(length) | chat_speed(length, folder)
    for name, isolate in {"rows": False, "rows_isolated": True}.items():
        paths, cache = (str(folder / "corpus"),), str(folder / "cache")
        config = BlendConfig(paths=paths, split="1", cache_dir=cache, isolate_documents=isolate)
        source = config.build(rows=Rows(tokens // length - rows), **build).train
        count = min(2000, len(source))
        elapsed = best(lambda source=source, count=count: [source[row] for row in range(count)])
        figures[f"{name}_tokens_per_second"] = count * length / elapsed
        steps = min(600, len(source) // rows - 8)
        for threads in (1, 2, 4):
            speed = batch_speed(source, rows, steps, LoaderConfig(threads=threads))
            figures[f"{name}_to_device_{threads}_threads_tokens_per_second"] = speed
    mock = MockConfig().build(rows=Rows(rows * 620), **build).train
    figures["mock_to_device_tokens_per_second"] = batch_speed(mock, rows, 600, LoaderConfig())
    figures["data_wait_ms_at_20_ms_steps"] = data_wait(source, rows, 100, 0.02)
    return figures


def write_documents(prefix: Path, tokens: int, lengths: tuple[int, int]) -> None:
    """A token file of random documents whose lengths are between two numbers."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        while tokens > 0:
            document = random.integers(0, VOCABULARY - 1, int(random.integers(*lengths)), dtype=np.uint16)
            writer.add_document([document])
            tokens -= len(document)


def index_speed(sequence_length: int) -> dict[str, float]:
    """The index of three epochs of two million documents, and a blend of twenty datasets."""
    lengths = np.random.default_rng(0).integers(50, 3000, 2_000_000).astype(np.int32)
    total = 3 * int(lengths.sum(dtype=np.int64))
    rows = total // sequence_length - 1
    request = IndexRequest(first=0, last=len(lengths), rows=rows, sequence_length=sequence_length, seed=1)
    index_seconds = best(lambda: build_index(lengths, request, "benchmark"), 2)
    weights = np.random.default_rng(0).random(20).tolist()
    return {
        "index_tokens": total,
        "index_seconds": index_seconds,
        "index_tokens_per_second": total / index_seconds,
        "blend_rows_per_second": 1_000_000 / best(lambda: weighted_index(weights, 1_000_000), 1),
    }


def loader_of(source: Any, rows: int, config: LoaderConfig) -> Loader:
    """A loader of batches of `rows` rows on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    text = text_schema(source.sequence_length, 2**31)
    schema = {**{name: leaf for name, leaf in text.items() if name in source[0]}, SAMPLE: Leaf("uint32")}
    shardings = dict.fromkeys(schema, NamedSharding(mesh, PartitionSpec(None, "data")))
    return Loader(source, global_size=rows, microbatches=1, schema=schema, shardings=shardings, config=config)


def batch_speed(source: Any, rows: int, steps: int, config: LoaderConfig) -> float:
    """Tokens per second from the source to arrays on the devices, without other work."""
    with loader_of(source, rows, config) as loader:
        jax.block_until_ready(next(loader))
        passed = best(lambda: [jax.block_until_ready(next(loader)[0]) for _ in range(steps // REPEATS)], REPEATS)
    return steps // REPEATS * rows * source.sequence_length / passed


def data_wait(source: Any, rows: int, steps: int, busy: float) -> float:
    """Mean milliseconds that a step waits for its batch if the host is idle for `busy` seconds in each step."""
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
    """20,000 conversations of 2 to 6 messages with the byte tokenizer, and 10^6 lengths that are only packed.

    Lengths are log-normal, like those of chats; a tenth of the conversations is longer than half a row.
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
    build: dict[str, Any] = {"tokenizer": ByteTokenizerConfig().build(), "schema": text_schema(length, 257)}
    build |= {"rows": Rows(None), "seed": 1}
    start = time.perf_counter()
    rows = config.build(**build).train
    build_seconds = time.perf_counter() - start
    lengths = draw.lognormal(np.log(length / 6), 0.85, 1_000_000).clip(20, length).astype(int)
    sample_rows = min(2000, len(rows))
    return {
        "chat_packing_share": rows.packing.fill,
        "chat_conversations_built_per_second": count / build_seconds,
        "chat_conversations_from_cache_per_second": count / best(lambda: config.build(**build)),
        "chat_rows_per_second": sample_rows / best(lambda: [rows[row] for row in range(sample_rows)]),
        "packing_conversations_per_second": len(lengths) / best(lambda: best_fit(lengths, length), 1),
        "packing_share": lengths.sum() / (length * len(best_fit(lengths, length))),
    }
