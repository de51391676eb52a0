"""A user's training script: run unchanged on every rank, measured by what it reports."""
