"""Training data of a step: batches of text, of documents or from a user's factory."""
