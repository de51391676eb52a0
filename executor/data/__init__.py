"""What a step trains on: batches of text, of documents, of a user's factory."""
