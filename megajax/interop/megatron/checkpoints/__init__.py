"""Checkpoints of Megatron-LM."""
