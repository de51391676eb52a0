"""How the next configuration is chosen."""
