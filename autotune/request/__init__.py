"""Tuning requests: their fields at every entry point."""
