"""A training script of the user's own: run as it is on every rank, measured by what it tells."""
