"""Putting a run together and stepping it. Notebooks use `megajax.setup`, whose runs also generate text."""
