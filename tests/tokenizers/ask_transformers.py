"""Ids of transformers, printed by a Python that has it: python ask_transformers.py CASES.json > IDS.json.

CASES.json: folder -> {"texts": [...], "chats": [[messages, add_generation_prompt], ...]}.
"""

import json
import sys
from pathlib import Path

import transformers
from transformers import AutoTokenizer


def main() -> None:
    transformers.logging.set_verbosity_error()
    answers = {}
    for folder, cases in json.loads(Path(sys.argv[1]).read_text()).items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        has_template = tokenizer.chat_template is not None
        answers[folder] = {
            "kind": type(tokenizer).__name__,
            "texts": [tokenizer(text).input_ids for text in cases["texts"]],
            "chats": [
                tokenizer.apply_chat_template(chat, add_generation_prompt=header, tokenize=True, return_dict=False)
                for chat, header in (cases["chats"] if has_template else ())
            ],
            "special": sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
            "size": len(tokenizer),
        }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
