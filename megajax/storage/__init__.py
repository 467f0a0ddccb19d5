"""How files are written whole, named and read again after transient errors."""
