"""The HTTP server around an engine: OpenAI's routes, Megatron-LM's, and a page."""
