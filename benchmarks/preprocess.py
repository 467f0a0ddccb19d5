"""Preprocessing speed per core for bytes and GPT-2's encoding, compared with the `tokenizers` package.

    python benchmarks/preprocess.py --input wiki.txt … --vocab-file vocab.json --merge-file merges.txt

Every non-blank line of the inputs becomes a document of a JSON-lines file, repeated up to --megabytes of text. Figures
of one process use processor time, which depends less on other programs than wall-clock time. The best of --repeats
counts. Writes benchmarks/results/preprocess.json.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import outcome

from megajax.data.preprocessing.options import Preprocessing
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    TokenizerConfig,
)


def best(repeats: int, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Least time of several runs, in seconds of `clock`."""
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


def rates(documents: int, size: int, seconds: float) -> dict[str, float]:
    """Rates of one measurement over `size` bytes of text."""
    return {
        "seconds": round(seconds, 3),
        "megabytes_per_second": round(size / seconds / 1e6, 2),
        "documents_per_second": round(documents / seconds),
    }


def measure(config: TokenizerConfig, texts: list[str], folder: Path, options: argparse.Namespace) -> dict:
    """Encoding alone, and the whole of preprocessing from JSON lines to files, with one process and with several."""
    size = sum(len(text.encode()) for text in texts)
    tokenizer = config.build()
    encode = best(options.repeats, time.process_time, lambda: [tokenizer.encode(text) for text in texts])

    def preprocess_all(workers: int) -> None:
        preprocess(
            Preprocessing(
                inputs=(str(folder / "documents.jsonl"),),
                prefix=str(folder / "out"),
                tokenizer=config,
                append_eod=True,
                workers=workers,
                overwrite=True,
            )
        )

    single = best(options.repeats, time.process_time, lambda: preprocess_all(1))
    several = best(options.repeats, time.perf_counter, lambda: preprocess_all(options.workers))
    return {
        "tokens": sum(len(tokenizer.encode(text)) for text in texts),
        "encode_one_core": rates(len(texts), size, encode),
        "preprocess_one_core": rates(len(texts), size, single),
        "preprocess_wall_clock": {"workers": options.workers, **rates(len(texts), size, several)},
    }


def documents(paths: list[str], size: int) -> list[str]:
    """Lines of the files, over and over until they have `size` bytes."""
    lines = [line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
    once = sum(len(line.encode()) for line in lines)
    return lines * -(-size // once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, help="plain text files")
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges.txt")
    parser.add_argument("--megabytes", type=float, default=20.0, help="text to tokenise (default: 20)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes in parallel (default: cores)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats; the best counts (default: 3)")
    options = parser.parse_args()
    import tokenizers

    texts = documents(options.input, int(options.megabytes * 1e6))
    rates = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        peer = tokenizers.ByteLevelBPETokenizer(options.vocab_file, options.merge_file)
        peer.add_special_tokens(["<|endoftext|>"])
        peer.save(str(folder / "tokenizer.json"))
        configs = {
            "byte": ByteTokenizerConfig(),
            "gpt2": GPT2TokenizerConfig(vocabulary=options.vocab_file, merges=options.merge_file),
            "huggingface, same vocabulary": HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json")),
        }
        for kind, config in configs.items():
            rates[kind] = measure(config, texts, folder, options)
    text = {
        "files": [Path(path).name for path in options.input],
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
    }
    outcome.write("preprocess", {"text": text, **rates})


if __name__ == "__main__":
    main()
