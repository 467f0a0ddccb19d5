"""Routes whose answer is no text: vectors of texts, and scores of pairs of texts."""
