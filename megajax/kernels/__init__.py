"""Pure array functions: a reference implementation and fast ones with the same signature."""
