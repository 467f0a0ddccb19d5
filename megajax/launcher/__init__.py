"""What stands outside the processes of a run: starts, first failures, restarts."""
