"""What surrounds a training run: banner, resume, hooks, compile cache, device memory and faults."""
