"""Processes for the tests of this folder."""

from gangs import start_processes

__all__ = ["start_processes"]
