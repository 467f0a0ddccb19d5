"""The weights of an engine's steps while it lives."""
