"""Writes the folder megatron_chats: a tokenizer, chats, and the rows that Megatron-LM's SFTDataset makes of them.

Run with megatron-core 0.19.2, torch 2.15, transformers 5.23.0 and tokenizers 0.23 (CPU):

    python tests/data/make_megatron_chats.py
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
from megatron.training.datasets.sft_dataset import SFTDataset
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

FOLDER = Path(__file__).parent / "megatron_chats"
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")
WORDS = ("System", "User", "Assistant")
"""Each is one token, as in the tokenizers that the Nemotron formats are made for."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?+-*/=_\n\t<>'\"éß中"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
OPEN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
"""Its text does not end with the end-of-document token."""
CASES = [
    {"format": name, "length": length, "context": context}
    for name in ("default", "identity", "nemotron-h-aligned", "nemotron-nano-v2")
    for length, context in ((96, 1), (60, 1), (64, 2))
] + [{"format": "default", "length": 80, "context": 1, "tokenizer": "open"}]


def talks() -> list[list[dict[str, str]]]:
    """Conversations: several turns and several of them in a line, short and long, with blanks at their ends."""
    draw = np.random.RandomState(11)
    words = ["the", "a", "sum", "of", "2", "3", "blue", "sky", "why", "not", "three", "cats!", "no.", "yes,", "café",
             "straße"]  # fmt: skip

    def text(most: int) -> str:
        return " ".join(draw.choice(words, draw.randint(1, most)))

    lines = []
    for number in range(14):
        line = []
        for _ in range(draw.randint(1, 4)):
            if number % 3 or line:
                line.append({"role": "system", "content": "" if number % 4 == 1 else text(3)})
            for _ in range(draw.randint(1, 3)):
                line.append({"role": "user", "content": text(5)})
                line.append({"role": "assistant", "content": text(4 + 12 * (number % 5 == 4))})
        lines.append(line)
    lines.append([
        {"role": "system", "content": " /think be brief \n"},
        {"role": "user", "content": "  /no_think why?\t"},
        {"role": "assistant", "content": "\n sky. /think "},
    ])  # fmt: skip
    return lines


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """A tokenizer with a token for each letter, each of WORDS and each special token."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {piece: number for number, piece in enumerate((*SPECIALS, *WORDS, *LETTERS))}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*WORDS, r"[\s\S]"])), "isolated")
    engine.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    engine.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


class Chats(SFTDataset):
    """Megatron-LM's rows of conversations in memory: reading the file would need the package `datasets`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        raise NotImplementedError


def rows_of(case: dict[str, Any], lines: list[Any]) -> dict[str, np.ndarray]:
    tokenizer = SFTTokenizer(str(FOLDER / case.get("tokenizer", "plain")), case["format"])
    config = SimpleNamespace(
        tokenizer=SimpleNamespace(
            tokenize_conversation=tokenizer.tokenize_conversation, eod=tokenizer.eod, pad=tokenizer.pad_id
        ),
        sequence_length=case["length"],
        context_parallel_size=case["context"],
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
    )
    dataset = object.__new__(Chats)
    dataset.dataset, dataset.config, dataset.num_samples = lines, config, len(lines)
    dataset.indices, dataset.index_split = np.arange(len(lines)), Split.train
    rows = [dataset[number] for number in range(len(lines))]
    stacked = {name: torch.stack([row[name] for row in rows]).numpy() for name in rows[0]}
    stacked["loss_mask"] = stacked["loss_mask"].astype(np.int64)
    return {name: values.astype(np.int16) for name, values in stacked.items()}


def main() -> None:
    write_tokenizer(FOLDER / "plain", pad_token="<pad>", chat_template=TEMPLATE)
    write_tokenizer(FOLDER / "open", bos_token="<s>", chat_template=OPEN_TEMPLATE)
    lines = talks()
    text = "".join(json.dumps({"messages": line}, ensure_ascii=False) + "\n" for line in lines)
    (FOLDER / "chats.jsonl").write_text(text, encoding="utf-8")
    arrays = {}
    for number, case in enumerate(CASES):
        arrays |= {f"{number}/{name}": values for name, values in rows_of(case, lines).items()}
    np.savez_compressed(FOLDER / "rows.npz", **arrays)
    digest = hashlib.sha256((FOLDER / "rows.npz").read_bytes()).hexdigest()
    (FOLDER / "cases.json").write_text(json.dumps({"cases": CASES, "rows_sha256": digest}, indent=1) + "\n")


if __name__ == "__main__":
    main()
