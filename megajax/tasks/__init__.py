"""Evaluation of models on tasks."""
