"""The device mesh, the rules from logical to mesh axes, layouts, and the start of multi-process runs."""
