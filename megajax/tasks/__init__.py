"""Evaluation of causal language models on tasks."""
