"""Formats of other libraries: Hugging Face, Megatron-LM, PEFT, and conversion between them and runs."""
