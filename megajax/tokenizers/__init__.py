"""Text to token ids and back: `config.py` says which, `base.py` what every tokenizer offers."""
