"""What helps around training: reading Megatron-LM command lines."""
