"""Attention over rows sharded over devices: each strategy builds its `Passes` from those of a backend."""
