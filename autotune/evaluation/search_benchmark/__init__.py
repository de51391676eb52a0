"""Strategies against each other on tables of measurements that others made: `autotune bench-search`."""
