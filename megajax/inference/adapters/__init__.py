"""Adapters in the slots of a model, one for each request."""
