"""Data at scale: start of a job with 10^8 documents, blends of 1,000 datasets, and rows beside megatron-core's.

Run:  python benchmarks/data_scale.py [--documents=1e8] [--processes=4] [--before=TREE] [--megatron=PYTHON]

Every part runs in processes of its own, which take turns where they are compared. With --before, the code of another
checkout of this repository is measured too; with --megatron, rows are read by megatron-core with that Python. Memory is
that of the process alone (RssAnon); mapped files are shared by all processes of a host. The token file of the first
part has a sparse `.bin`. Prints JSON and writes it to benchmarks/results/data_scale.json.
"""

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import outcome

TREE = Path(__file__).parents[1]
CHUNK = 1 << 22
MEAN_TOKENS, LONG_ROW, SHORT_ROW = 600, 4096, 1024
"""Tokens of a document, of a row of the first part, and of a row that is read."""
TURNS, ROWS_PER_TURN = 11, 4000
TOKENIZER = SimpleNamespace(vocabulary_size=50_000, eod=49_999, pad=None, identity="benchmark")

MEGATRON = """
import sys, time
import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
prefix, length, rows, cache, whole = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "rows"

class Tokenizer:
    eod, pad, vocab_size, unique_identifiers = 49_999, None, 50_000, {"kind": "benchmark"}

config = GPTDatasetConfig(
    random_seed=1, sequence_length=length, blend=([prefix], None), split="1,0,0", path_to_cache=cache,
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    tokenizer=Tokenizer(),
)
tokens = IndexedDataset(prefix)
dataset = GPTDataset(tokens, prefix, np.arange(len(tokens), dtype=np.int32), rows, Split.train, config)
read = dataset.__getitem__ if whole else dataset._query_document_sample_shuffle_indices
print("ready", flush=True)
for _ in sys.stdin:
    start = time.process_time()
    for row in range(rows):
        read(row)
    print(time.process_time() - start, flush=True)
"""


def write_index(prefix: Path, documents: int) -> int:
    """A token file of random lengths with a `.bin` that is a hole; returns its tokens."""

    def lengths() -> Any:
        draw = np.random.default_rng(0)
        for start in range(0, documents, CHUNK):
            yield draw.integers(1, 2 * MEAN_TOKENS, min(CHUNK, documents - start), dtype=np.int32)

    total = 0
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        for part in lengths():
            file.write(part.tobytes())
        for part in lengths():
            ends = total + np.cumsum(2 * part, dtype=np.int64)
            file.write((ends - 2 * part).tobytes())
            total = int(ends[-1])
        for start in range(0, documents + 1, CHUNK):
            file.write(np.arange(start, min(start + CHUNK, documents + 1), dtype=np.int64).tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(total)
    return total // 2


def write_documents(prefix: Path, mean: int, tokens: int) -> None:
    from megajax.data.text.indexed_dataset import IndexedWriter

    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        while tokens > 0:
            document = draw.integers(0, 49_999, int(draw.integers(mean // 2, mean * 3 // 2)), dtype=np.uint16)
            writer.add_document([document])
            tokens -= len(document)


def open_rows(prefix: str, cache: str, length: int, rows: int | None) -> Any:
    from megajax.data.configs import BlendConfig, Rows
    from megajax.models.configs import text_schema

    config = BlendConfig(paths=(prefix,), split="1", cache_dir=cache)
    return config.build(tokenizer=TOKENIZER, schema=text_schema(length, 2**31), rows=Rows(rows), seed=1).train


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def child_start(prefix: str, cache: str) -> None:
    """Opens the data as a process of a job does; prints seconds, CPU seconds, peak of memory, and the order."""

    before = peak = anonymous_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.02):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    wall, cpu = time.perf_counter(), time.process_time()
    order = open_rows(prefix, cache, LONG_ROW, None).order()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finished.set()
    thread.join()
    print(wall, cpu, peak - before, order)


def child_rows(prefix: str, cache: str) -> None:
    source = open_rows(prefix, cache, SHORT_ROW, ROWS_PER_TURN)

    def read() -> None:
        for row in range(ROWS_PER_TURN):
            source[row]

    take_turns(read)


def child_blend(datasets: str, rows: str) -> None:
    from megajax.data.rows.blend import weighted_index

    weights = np.random.default_rng(int(datasets)).random(int(datasets)).tolist()
    take_turns(lambda: weighted_index(weights, int(rows)))


def take_turns(work: Callable[[], object]) -> None:
    """CPU seconds of the work, for each line of the standard input."""
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        work()
        print(time.process_time() - start, flush=True)


def command(tree: Path, *words: object) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return [sys.executable, __file__, *map(str, words)], environment


def job_starts(tree: Path, prefix: Path, cache: Path, processes: int) -> dict[str, Any]:
    """Processes that open the data at once, with and without a cache."""
    figures = {}
    for phase in ("cold", "warm"):
        line, environment = command(tree, "--child=start", prefix, cache)
        start = time.perf_counter()
        running = [subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        answers = [process.communicate()[0].split() for process in running]
        (order,) = {answer[3] for answer in answers}
        figures[phase] = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": sum(float(answer[1]) for answer in answers),
            "anonymous_MiB_of_each_process": sorted(round(int(answer[2]) / 2**20) for answer in answers),
            "order": order,
        }
    return figures


def compare(lines: dict[str, tuple[list[str], dict[str, str]]], count: int) -> dict[str, float]:
    """Items per CPU second of each command, by turns: the median."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    running = {name: subprocess.Popen(line, env=environment, **pipes) for name, (line, environment) in lines.items()}
    for name, process in running.items():
        while (answer := process.stdout.readline().strip()) != "ready":
            if not answer and process.poll() is not None:
                raise SystemExit(f"{name}: ended with {process.returncode}")
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(TURNS):
        for name, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[name].append(float(process.stdout.readline()))
    for process in running.values():
        process.stdin.close()
        process.wait()
    return {name: count / statistics.median(values[1:]) for name, values in seconds.items()}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trees = {"after": TREE} | ({"before": arguments.before.resolve()} if arguments.before else {})
    documents = int(arguments.documents)
    results: dict[str, Any] = {"tokens": write_index(folder / "large", documents)}
    for name, tree in reversed(trees.items()):
        figures = job_starts(tree, folder / "large", folder / f"cache-{name}", arguments.processes)
        results[f"start_{name}"] = figures
    for mean in (60, 600, 5000):
        write_documents(folder / f"text{mean}", mean, 15_000_000)
        lines = {
            name: command(tree, "--child=rows", folder / f"text{mean}", folder / f"rows-{name}")
            for name, tree in trees.items()
        }
        for name in ("rows", "tokens alone") if arguments.megatron else ():
            words = (folder / f"text{mean}", SHORT_ROW, ROWS_PER_TURN, folder / "megatron", name)
            plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
            lines[f"megatron-core, {name}"] = ([arguments.megatron, "-c", MEGATRON, *map(str, words)], plain)
        results[f"rows_per_second_documents_of_{mean}"] = compare(lines, ROWS_PER_TURN)
    for datasets, rows in ((2, 100_000), (20, 100_000), (1000, 30_000), (5000, 10_000)):
        lines = {name: command(tree, "--child=blend", datasets, rows) for name, tree in trees.items()}
        results[f"blend_rows_per_second_{datasets}_datasets"] = compare(lines, rows)
    return results


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, default=1e8)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--megatron")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        {"start": child_start, "rows": child_rows, "blend": child_blend}[arguments.child](*arguments.words)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments, Path(folder))
    settings = {"documents": int(arguments.documents), "processes": arguments.processes}
    outcome.write("data_scale", settings | rounded(results))


if __name__ == "__main__":
    main()
