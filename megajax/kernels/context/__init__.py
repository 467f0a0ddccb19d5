"""Attention over rows that are cut over devices: each strategy is a `Passes` made of a backend's."""
