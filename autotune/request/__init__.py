"""A tuning request: its fields, at every entry point."""
