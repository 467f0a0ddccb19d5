"""Which dtype computes and which stores."""
