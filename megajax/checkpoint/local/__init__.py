"""Checkpoints on the disks of the machines, between those in the shared folder."""
