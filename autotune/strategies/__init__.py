"""Strategies: how the next configuration is chosen."""
