"""The choice of the next token of a row: sampling on the device, beam search, and texts constrained by a grammar."""
