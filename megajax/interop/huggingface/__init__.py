"""Other libraries' checkpoints: Hugging Face."""
