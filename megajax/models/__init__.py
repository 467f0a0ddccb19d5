"""Models, their formulas, and families of models as presets."""
