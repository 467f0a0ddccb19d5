"""Run by streams.py with a Python that has torch: rows of packed text by `datasets` and torch's DataLoader.

Arguments: folder with *.parquet and tokenizer.json, output, tokens of a row, rows of a batch.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import tokenizers
import torch


def main() -> None:
    folder, out, length, rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")

    def packed(batch: dict) -> dict:
        """As `group_texts` of transformers' examples: what is left of a batch of documents is dropped."""
        encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        tokens = np.fromiter(itertools.chain.from_iterable([*text.ids, end] for text in encoded), np.int64)
        size = (len(tokens) - 1) // length * length
        return {"tokens": tokens[:size].reshape(-1, length), "labels": tokens[1 : size + 1].reshape(-1, length)}

    def loader(*, shuffle: bool):
        files = sorted(map(str, folder.glob("*.parquet")))
        source = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        source = source.shuffle(seed=1, buffer_size=1000) if shuffle else source
        source = source.map(packed, batched=True, batch_size=1000, remove_columns=["text"]).with_format("torch")
        return torch.utils.data.DataLoader(source, batch_size=rows, num_workers=0)

    first = next(iter(loader(shuffle=False)))["tokens"][0].tolist()
    batches = iter(loader(shuffle=True))
    count = 0
    began = time.process_time()
    for batch in batches:
        count += len(batch["tokens"])
    spent = time.process_time() - began
    out.write_text(json.dumps({"rows_per_second": count / spent, "first": first}))


if __name__ == "__main__":
    main()
