"""Measurements of other tables, logs and jobs: how they are read, and what predictions learn from them."""
