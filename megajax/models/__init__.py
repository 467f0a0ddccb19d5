"""What a network is, its formulas, and the families as presets."""
