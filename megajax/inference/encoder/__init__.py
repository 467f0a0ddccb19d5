"""An engine of models that read whole texts and give their embeddings, and no text."""
