"""Two folders as transformers 5.23 reads them: tokenizers, chats, settings, dtype; and an answer of the second.

Run by test_export_of_runs with another Python, which has transformers and torch.
"""

import sys

import torch  # ty: ignore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # ty: ignore

TEXTS = ("the cat sat", "  a\n\nb ", "<s>x</s>", "\u00e9 \u65e5\u672c \U0001f642", "<|im_start|>user<|im_end|>")
MESSAGES = [{"role": "user", "content": "the cat"}]

source, export = sys.argv[1:]
tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, export)]
first, second = ([tokenizer.encode(text) for text in TEXTS] for tokenizer in tokenizers)
assert first == second, (first, second)
chats = [tokenizer.apply_chat_template(MESSAGES, tokenize=False) for tokenizer in tokenizers]
assert chats[0] == chats[1] and "the cat" in chats[0], chats
first, second = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, export))
ignored = {"_name_or_path"}
assert {k: v for k, v in first.items() if k not in ignored} == {k: v for k, v in second.items() if k not in ignored}
models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (source, export)]
assert models[1].dtype == torch.bfloat16, models[1].dtype
assert models[0].generation_config.to_dict() == models[1].generation_config.to_dict()
prompt = tokenizers[1].apply_chat_template(MESSAGES, return_tensors="pt", return_dict=True)
answer = models[1].generate(**prompt, max_new_tokens=4, do_sample=False)
assert answer.shape[1] > prompt["input_ids"].shape[1]
