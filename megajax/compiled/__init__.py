"""Compiled programs: their text, and what their instructions cost on a GPU."""
