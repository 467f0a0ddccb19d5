"""Models whose layers are of several kinds."""
