"""Comparison of strategies on published tables of measurements: `autotune bench-search`."""
