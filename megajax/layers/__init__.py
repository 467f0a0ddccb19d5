"""NNX modules that say the layout of each weight beside it."""
