"""Memory and time of converting a large model."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.processes import memory
from megajax.checkpoint.weights.foreign import Entry, declared_by
from megajax.checkpoint.weights.name_mapping import resolved
from megajax.interop.huggingface.registry import families
from megajax.interop.huggingface.safetensors import SafetensorsFolder, ShardWriter
from megajax.models.presets.llama import llama2

SHARD_BYTES = 5_000_000_000


def random_bfloat16(shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Random bytes whose highest exponent bit is 0, so that all values are finite and below 2."""
    bits = np.frombuffer(draw.bytes(2 * prod(shape)), np.uint16) & np.uint16(0xBFFF)
    return bits.view(jnp.bfloat16).reshape(shape)


def convert(*, size: str = "7b", folder: Path | None = None) -> dict[str, Any]:
    """Memory and time of converting a large model: random weights -> run -> Hugging Face folder, equal byte for byte.

    Creates a folder with the shapes of Llama 2 and random bytes (7b: 13.5 GB of bfloat16), converts it to a run with
    float32 weights by `python -m megajax.convert`, deletes the folder, and converts back. Compares the hash of each
    tensor. 7b needs 41 GB of disk; everything is deleted afterwards. Memory excludes pages of mapped files, which the
    kernel can drop at any time. --size: debug, 7b, 13b or 70b.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="convert-") as home:
        return measure(size, Path(home))


def make(folder: Path, size: str) -> dict[str, str]:
    """Write a Llama 2 of random weights. Returns the hash of each tensor."""
    model, family, draw = llama2(size), families()["llama"], np.random.default_rng(0)
    table = resolved(family.rows(model), declared_by(model))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**family.config_json(model), "torch_dtype": "bfloat16"}))
    hashes = {}
    entries = {tensor.name: Entry(tensor.shape(), np.dtype(jnp.bfloat16)) for tensor in table}
    for name, file in ShardWriter(folder, entries, SHARD_BYTES):
        values = random_bfloat16(entries[name].shape, draw)
        hashes[name] = digest(values)
        file.write(name, values)
    return hashes


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))).hexdigest()


def converted(source: str, target: str, gigabytes: float) -> dict[str, float]:
    """Seconds and peak memory of a conversion. gigabytes: of its source and target together."""
    command = [sys.executable, "-m", "megajax.convert", f"--from={source}", f"--to={target}"]
    started, peaks = time.monotonic(), {"private": 0, "VmHWM": 0}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now = memory(process.pid)
            peaks["private"] = max(peaks["private"], now.get("RssAnon", 0) + now.get("RssShmem", 0))
            peaks["VmHWM"] = max(peaks["VmHWM"], now.get("VmHWM", 0))
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    seconds = time.monotonic() - started
    return {
        "seconds": round(seconds, 1),
        "megabytes_per_second_read_and_written": round(1e3 * gigabytes / seconds, 1),
        "peak_private_megabytes": round(peaks["private"] / 1e6, 1),
        "peak_with_mapped_files_megabytes": round(peaks["VmHWM"] / 1e6, 1),
    }


def size_of(folder: Path) -> float:
    """GB of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


def measure(size: str, home: Path) -> dict[str, Any]:
    """Convert in both directions. Raises SystemExit if a tensor differs afterwards."""
    elements = sum(prod(spec.shape) for spec in declared_by(llama2(size)).values())
    if (free := shutil.disk_usage(home).free) < 6.5 * elements:
        raise SystemExit(f"{home} has {free / 1e9:.1f} GB free, {6.5 * elements / 1e9:.1f} GB are needed")
    hashes = make(home / "theirs", size)
    largest = max(
        prod(entry.shape) * entry.dtype.itemsize for entry in SafetensorsFolder(home / "theirs").entries().values()
    )
    theirs = size_of(home / "theirs")
    forward_figures = converted(f"hf:{home / 'theirs'}", str(home / "run"), theirs + 4 * elements / 1e9)
    run_bytes = size_of(home / "run")
    shutil.rmtree(home / "theirs")
    back = converted(str(home / "run"), f"hf:{home / 'back'}", run_bytes + theirs)
    written_folder = SafetensorsFolder(home / "back")
    mismatched = [
        name for name in written_folder.entries() if hashes.pop(name, "") != digest(written_folder.read(name))
    ]
    if mismatched or hashes:
        raise SystemExit(f"these tensors differ after the conversion: {', '.join([*mismatched, *hashes])}")
    allowed = 2 * largest / 1e6 + 2**30 / 1e6
    return {
        "model": f"llama2 {size}",
        "gigabytes_bfloat16": round(theirs, 2),
        "gigabytes_of_the_run": round(run_bytes, 2),
        "largest_tensor_megabytes": round(largest / 1e6, 1),
        "allowed_megabytes": round(allowed, 1),
        "hugging_face_to_run": forward_figures,
        "run_to_hugging_face": back,
        "within_allowed": max(forward_figures["peak_private_megabytes"], back["peak_private_megabytes"]) <= allowed,
        "tensors_equal": True,
    }
