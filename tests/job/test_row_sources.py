"""The order in which a run reads its row sources, and the rows that they skip."""

import json

import numpy as np
import pytest
from run_folder import events
from small_jobs import DOCUMENTS, losses, model, run_config

from megajax.data.chat.config import ChatConfig
from megajax.data.rows.config import CyclicConfig, LoaderConfig
from megajax.data.rows.cyclic import CyclicRows
from megajax.data.text.config import MockConfig
from megajax.job.job import train
from megajax.job.notebook import prepare
from megajax.job.start.resume import facts
from megajax.metrics.config import LoggingConfig
from megajax.reporting.write_report import close_run
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.config import EvaluationConfig


def test_rows_have_another_order_in_each_pass():
    """Training and its evaluations read them so; a whole pass over the validation split does not."""
    plain, cyclic = (
        MockConfig(documents=DOCUMENTS, **more)
        for more in ({}, {"loader": LoaderConfig(cyclic=CyclicConfig(buckets=False))})
    )
    before, parts = prepare(run_config(data=plain)), prepare(run_config(data=cyclic))
    train, valid = parts.splits.train, parts.splits.valid
    assert isinstance(train, CyclicRows) and isinstance(valid, CyclicRows) and len(train) == 48
    source = before.splits.train
    numbers = [train.number(row) for row in range(48)]
    assert len(set(numbers)) == 48 and max(numbers) < len(source)
    np.testing.assert_array_equal(train[5]["tokens"], source[numbers[5]]["tokens"])
    named = "data: order of the training rows (more steps may need another epoch)"
    assert facts(parts)[named] != facts(before)[named], "a resume with another order is refused"
    whole = prepare(run_config(data=cyclic, evaluation=EvaluationConfig(full=True)))
    assert not isinstance(whole.splits.valid, CyclicRows) and isinstance(whole.splits.train, CyclicRows)


def test_skipped_rows_of_the_splits(tmp_path):
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(talk)] * 40 + ["{"]))
    files = {"paths": (str(tmp_path / "chats.jsonl"),), "split": "1,1,1", "cache_dir": str(tmp_path)}
    data = ChatConfig(**files, on_error="skip", loader=LoaderConfig(cyclic=CyclicConfig()))
    small = model(vocabulary_size=257, sequence_length=32)
    parts = prepare(run_config(model=small, tokenizer=ByteTokenizerConfig(), data=data))
    assert parts.skipped_rows() == {"train": {"not a conversation": 1}}
    assert prepare(run_config()).skipped_rows() == {}


@pytest.mark.slow
def test_skipped_lines_of_conversations(tmp_path, capsys):
    """Three of the lines are no conversations; the run trains on the others, and on fewer with every step."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": turns})] * 20 + ["{", '{"messages": 1}', json.dumps({"messages": turns[:1]})]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    cfg = run_config(
        tmp_path / "run",
        model=model(repeats=1, vocabulary_size=257, sequence_length=32),
        tokenizer=ByteTokenizerConfig(),
        data=ChatConfig(paths=(str(tmp_path / "chats.jsonl"),), split="1", on_error="skip", cache_dir=str(tmp_path)),
        evaluation=EvaluationConfig(batches=0),
        logging=LoggingConfig(every=1, plot=False, sample=False, live="never", report=True),
        steps=3,
    )
    assert train(cfg, reporter=close_run) == 0
    shown = "train: 2 not a conversation, 1 no answer"
    out = capsys.readouterr().out
    assert sum("rows skipped" in line and shown in line for line in out.splitlines()) == 2, "banner and last box"
    told = [event["splits"] for event in events(tmp_path / "run", "rows_skipped")]
    assert told == [{"train": {"not a conversation": 2, "no answer": 1}}]
    assert shown in (tmp_path / "run" / "report.html").read_text()
    trained = losses(tmp_path / "run")
    assert trained[-1] < trained[0]
