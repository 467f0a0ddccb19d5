"""Drafts of tokens that may follow, for a step of the model to verify."""
