"""Pure array functions: the reference first, fast paths beside it, one signature."""
