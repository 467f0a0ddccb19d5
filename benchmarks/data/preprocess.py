"""Preprocessing speed per core."""

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.stopwatch import best
from megajax.data.preprocessing.options import Preprocessing
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    TokenizerConfig,
)


def rates(documents: int, size: int, seconds: float) -> dict[str, float]:
    """The rates of documents with `size` bytes of text."""
    return {
        "seconds": round(seconds, 3),
        "megabytes_per_second": round(size / seconds / 1e6, 2),
        "documents_per_second": round(documents / seconds),
    }


def measure(config: TokenizerConfig, texts: list[str], folder: Path, workers: int, repeats: int) -> dict[str, Any]:
    """Encoding alone, and the whole of preprocessing from JSON lines to files, with one process and with several."""
    size = sum(len(text.encode()) for text in texts)
    tokenizer = config.build()
    encode = best(lambda: [tokenizer.encode(text) for text in texts], repeats, time.process_time)
    job = Preprocessing(
        inputs=(str(folder / "documents.jsonl"),),
        prefix=str(folder / "out"),
        tokenizer=config,
        append_eod=True,
        workers=1,
        overwrite=True,
    )
    single = best(lambda: preprocess(job), repeats, time.process_time)
    several = best(lambda: preprocess(replace(job, workers=workers)), repeats)
    return {
        "tokens": sum(len(tokenizer.encode(text)) for text in texts),
        "encode_one_core": rates(len(texts), size, encode),
        "preprocess_one_core": rates(len(texts), size, single),
        "preprocess_wall_clock": {"workers": workers, **rates(len(texts), size, several)},
    }


def documents(paths: tuple[str, ...], size: int) -> list[str]:
    """The lines of the files, repeated until they have `size` bytes."""
    lines = [line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
    once = sum(len(line.encode()) for line in lines)
    return lines * -(-size // once)


def preprocessing(
    *,
    input: tuple[str, ...],
    vocab_file: str,
    merge_file: str,
    megabytes: float = 20.0,
    workers: int = os.cpu_count() or 1,
    repeats: int = 3,
) -> dict[str, Any]:
    """Preprocessing speed per core for bytes and GPT-2's encoding, compared with the `tokenizers` package.

    --input: plain text files. --vocab-file, --merge-file: GPT-2's vocab.json and merges.txt. Every non-blank line
    becomes a document of a JSON-lines file, repeated up to --megabytes of text. Figures of one process use processor
    time, which depends less on other programs than wall-clock time. The best of --repeats counts.
    """
    import tokenizers

    texts = documents(input, int(megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts)
    text = {"files": [Path(path).name for path in input], "documents": len(texts), "bytes": size}
    figures: dict[str, Any] = {"text": text}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        peer = tokenizers.ByteLevelBPETokenizer(vocab_file, merge_file)
        peer.add_special_tokens(["<|endoftext|>"])
        peer.save(str(folder / "tokenizer.json"))
        configs = {
            "byte": ByteTokenizerConfig(),
            "gpt2": GPT2TokenizerConfig(vocabulary=vocab_file, merges=merge_file),
            "huggingface, same vocabulary": HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json")),
        }
        for kind, config in configs.items():
            figures[kind] = measure(config, texts, folder, workers, repeats)
    return figures
