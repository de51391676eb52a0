"""Measurements of others in tables, logs and jobs: how they are read, rows as cases, and what predictions learn from them."""
