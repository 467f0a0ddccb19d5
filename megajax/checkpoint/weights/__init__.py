"""Weights of models outside of a run: read, converted, compared and written without devices."""
