"""How the next token of a row is chosen: sampling on the device, beam search, and documents that follow a grammar."""
