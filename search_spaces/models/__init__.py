"""Models: what is trained, by shape, by Hugging Face configuration, as a user's module or script."""
