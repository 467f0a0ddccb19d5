"""Text to token ids and back: `config.py` has the settings, `base.py` the interface."""
