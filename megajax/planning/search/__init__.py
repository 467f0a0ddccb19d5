"""Search layouts of a config by formula, rank them, and compile the best."""
