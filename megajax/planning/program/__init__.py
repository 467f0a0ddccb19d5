"""Compile a train step for virtual devices and read the compiled program."""
