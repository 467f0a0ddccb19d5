"""MegaJAX: large-scale transformer training in JAX."""

__version__ = "0.1.0"
