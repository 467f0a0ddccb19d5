"""Measurements of speed and memory, and checks of results: `python -m benchmarks` lists them."""
