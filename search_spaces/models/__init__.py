"""Models: described by shape or Hugging Face configuration, or the user's module or script."""
