"""Rules: which configurations are refused, and what to do about it."""
