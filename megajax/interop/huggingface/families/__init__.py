"""A file for each family of models."""
