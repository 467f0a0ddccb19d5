"""Reference values in other forms than those of ../shared are read too: a small set of them, and its own tests.

The set has rows of mock documents, a blend for each split, a split token of fill-in-the-middle, conversations as token
ids, FLOPs of a hybrid without a report of memory, a folder without greedy tokens, and files and keys that no test
knows. Its values are those of MegaJAX, since only the readers are tested here.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_decoders import FILE
from test_fim_and_chats import Letters

from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.interop.megatron.flags.translate import convert
from megajax.models.decoder.config import text_schema

LENGTH, EOD = 16, 511
HERE = Path(__file__).parent
HYBRID = (
    "--hybrid-override-pattern M-M* --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --is-hybrid-model"
    " --position-embedding-type none --mamba-num-groups 2"
)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def rows_of(dataset: Any, count: int) -> dict[str, np.ndarray]:
    """Rows as Megatron-LM names their parts, and a part that no test knows."""
    rows = [dataset[number] for number in range(count)]
    names = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}
    return {theirs: np.stack([row[ours] for row in rows]) for theirs, ours in names.items()} | {"unknown": np.zeros(3)}


def write_data(folder: Path, cache: Path) -> None:
    draw = np.random.default_rng(0)
    for letter in "AB":
        with IndexedWriter(folder / f"corpus{letter}", np.dtype(np.uint16)) as writer:
            for size in draw.integers(2, 40, 60).tolist():
                writer.add_document([np.append(draw.integers(0, 500, size), EOD).astype(np.uint16)])
    tokenizer, schema = Letters(), text_schema(LENGTH, 512)
    given: dict[str, Any] = {"tokenizer": tokenizer, "schema": schema}
    mock = MockConfig().build(**given, rows=Rows(6), seed=1234)
    samples = {f"mock/train/{name}": rows for name, rows in rows_of(mock.train, 6).items()}
    paths = {"train_paths": ("0.3", str(folder / "corpusA"), "0.7", str(folder / "corpusB"))}
    blended = BlendConfig(**paths, cache_dir=str(cache)).build(**given, rows=Rows(20), seed=7)
    blends = {f"each/train/{name}": rows for name, rows in rows_of(blended.train, 4).items()}
    index = blended.train.index
    blends |= {"each/train/dataset_index": index.datasets, "each/train/dataset_sample_index": index.samples}
    each = {
        "blend_per_split": [[["corpusA", "corpusB"], [0.3, 0.7]], None, None],
        "split": None,
        "seed": 7,
        "seq": LENGTH,
    }
    each |= {"sizes": [20, None, None], "splits": {"train": {"len": len(blended.train)}, "valid": None}, "unknown": 1}
    write_json(folder / "gpt_meta.json", {"blend": {"each": each}, "unknown": {}})
    np.savez(folder / "gpt_samples.npz", **samples)
    np.savez(folder / "gpt_blends.npz", **blends)

    cut = FillInMiddleConfig(
        paths=(str(folder / "corpusB"),), split="80,15,5", cache_dir=str(cache), rate=1.0, fragment_token="split",
        fragment_rate=1.0, sequential_draws=True, **{f"{name}_token": name for name in Letters.special},
    )  # fmt: skip
    given["tokenizer"] = Letters(split=7)
    middle = rows_of(cut.build(**given, rows=Rows(8), seed=3).train, 8)
    meta: dict[str, Any] = {
        "fim/cut": {"seed": 3, "seq": LENGTH, "fim_rate": 1.0, "fim_spm_rate": 0.5, "fragment": 1.0}
    }
    meta["fim/cut"] |= {"split_sample": "<cut>", "split_token_id": 7, "sizes": [8, 0, 0], "corpus": "corpusB"}
    talks = [[5, 6, 7, 2], [8, 9, 2]]
    meta["sft/ids"] = {"conversations": talks, "seq": 6, "pad": 0, "eod": 2, "n": 2, "len_dataset": 2, "unknown": None}
    padded = np.array([[*talk, *[0] * (7 - len(talk))] for talk in talks])
    middle = {f"fim/cut/train/{name}": rows for name, rows in middle.items()}
    chats = {"tokens": padded[:, :-1], "labels": padded[:, 1:], "loss_mask": padded[:, 1:] != 0}
    chats = {f"sft/ids/{name}": rows for name, rows in chats.items()}
    write_json(folder / "masked_fim_sft_meta.json", {**meta, "unknown/case": {}})
    write_json(folder / "sft_vocab.json", {chr(97 + number): number for number in range(20)})
    np.savez(folder / "masked_fim_sft.npz", **middle, **chats)


def write_set(folder: Path) -> None:
    """The folder, and `oracle3` beside it."""
    (folder / "data").mkdir(parents=True)
    write_data(folder / "data", folder.parent / "cache")
    line = f"{HYBRID} --vocab-size 511 --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --mock-data"
    model = convert(f"{line} --train-iters 1 --lr 1e-4".split()).config.model
    case = {"cli": HYBRID, "padded_vocab_size": 512, "global_batch_size": 2, "unknown": 1}
    case["num_floating_point_operations"] = 2 * LENGTH * 2 * model.flops().megatron
    write_json(folder / "flops" / "flops_memory.json", {"hybrid_mamba": case})
    with tarfile.open(FILE) as archive:
        archive.extractall(folder / "hf", [one for one in archive if one.name.startswith("glm/")], filter="data")
        archive.extractall(
            folder.parent / "oracle3/hf", [one for one in archive if one.name.startswith("olmo/")], filter="data"
        )
    for path in (folder / "hf/glm", folder.parent / "oracle3/hf/olmo"):
        with np.load(path / "io.npz") as stored:
            kept = {name: stored[name] for name in ("input_ids", "logits")}
        np.savez(path / "io.npz", **kept, unknown=np.zeros(2))
        (path / "unknown.txt").touch()
    (folder / "numerics").mkdir()
    np.savez(folder / "numerics" / "unknown.npz", values=np.zeros(2))


@pytest.mark.slow
def test_other_forms_of_reference_values_are_read(tmp_path: Path) -> None:
    write_set(tmp_path / "oracle")
    files = [f"test_{name}.py" for name in ("data", "fim_and_chats", "flops", "numerics")]
    tests = ("test_logits_loss_and_greedy_tokens", "test_both_styles_of_config_json_are_read_and_kept")
    files += [f"test_decoders.py::{test}[{name}]" for test in tests for name in ("oracle glm", "oracle3 olmo")]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *files]
    variables = {**os.environ, "MEGAJAX_ORACLE_DIR": str(tmp_path / "oracle")}
    ended = subprocess.run(command, cwd=HERE, env=variables, capture_output=True, text=True, timeout=300)
    counts = dict(re.findall(r"^oracle (\w+): (.*)$", ended.stdout, re.MULTILINE))
    assert ended.returncode == 0 and counts == {
        "data": "4 passed, 5 skipped, 1 unsupported",  # Two files, the rows of mock documents and the blend.
        "decoders": "4 passed",
        "fim_and_chats": "2 passed",
        "flops": "1 passed, 1 skipped",
        "numerics": "1 unsupported",
    }, ended.stdout
