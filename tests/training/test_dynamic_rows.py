"""Rows of different effective length: one compiled program, and attention skips most padding."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_jobs import model, run_config

from megajax.data.chat.config import ChatConfig
from megajax.data.rows.splits import Rows
from megajax.job.notebook import set_up
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import AttentionBlocks, _split_into_blocks, blocks_for
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

LENGTH = 128


def config(folder: Path, apart: bool) -> RunConfig:
    """One row a line, with lines that grow: those of the last step are five times as long as those of the first."""
    lines = []
    for number in range(16):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * (1 + 6 * number)}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    files = {"paths": (str(folder / "chats.jsonl"),), "split": "1", "cache_dir": str(folder)}
    return run_config(
        folder / "run",
        model=model(repeats=1, vocabulary_size=257, sequence_length=LENGTH),
        tokenizer=ByteTokenizerConfig(),
        data=ChatConfig(**files, packing="lines", isolate_padding=apart),
        batch=BatchConfig(global_size=4, micro_size=2),
        evaluation=EvaluationConfig(batches=0),
        steps=4,
    )


def test_one_program_serves_rows_of_all_lengths(tmp_path: Path) -> None:
    """Neither the length of the text nor the numbering of padding recompiles, and the numbering changes no loss."""
    run = set_up(config(tmp_path, True), devices=jax.devices()[:1])
    filled = [[int(run.parts.splits.train.document_lengths(row)[0]) for row in range(n, n + 4)] for n in (0, 4, 8, 12)]
    assert sum(filled[3]) > 3 * sum(filled[0])
    joined = replace(run.parts, splits=set_up(config(tmp_path, False), devices=jax.devices()[:1]).parts.splits)
    with jax.set_mesh(run.mesh):
        joined_run = Run(joined, run.program.fresh_state()(), joined.loader(joined.splits.train, 0, training=True))
        losses, theirs = ([info.loss for info in each.steps(4)] for each in (run, joined_run))
    assert losses == pytest.approx(theirs, rel=1e-6) and len(set(losses)) == 4
    assert run.train_step._cache_size() == 1
    run.close()
    joined_run.close()


def computed(segments: np.ndarray, blocks: AttentionBlocks) -> int:
    """Blocks of scores that the kernel computes for a row."""
    index, ids = jnp.arange(len(segments)), jnp.asarray(segments)[None]
    first, last = np.asarray(_split_into_blocks(Mask(index, index, ids, ids), 1, blocks).keys_of)[0]
    return int((last - first).sum())


@pytest.mark.parametrize("size", [64, 256])
def test_padding_costs_few_blocks(tmp_path: Path, size: int) -> None:
    """No more than its own blocks on the diagonal and one before; joined with the text it costs the whole triangle."""
    turns = [{"role": "user", "content": "q" * 200}, {"role": "assistant", "content": "a" * 100}]
    (tmp_path / "chat").write_text(json.dumps({"messages": turns}))
    length, blocks, counts = 4096, blocks_for(size)[0], {}
    cfg = replace(config(tmp_path, True).data, paths=(str(tmp_path / "chat"),))
    schema = model(vocabulary_size=257, sequence_length=length).schema()
    for apart in (True, False):
        changed = replace(cfg, isolate_padding=apart)
        rows = changed.build(tokenizer=ByteTokenizerConfig().build(), schema=schema, rows=Rows(1), seed=1).train
        counts[apart] = computed(rows[0]["segment_ids"], blocks)
    queries, key_blocks = length // blocks.queries, blocks.queries // blocks.keys
    text = -(-320 // blocks.queries)
    assert rows[0]["loss_mask"].nonzero()[0].max() < 330
    assert counts[False] == computed(np.zeros(length, np.int32), blocks) == key_blocks * queries * (queries + 1) // 2
    assert counts[True] <= key_blocks * text * (text + 1) // 2 + queries * (key_blocks + 128 // blocks.keys)
    assert counts[False] > 4 * counts[True]
