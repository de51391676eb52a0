"""Rules: which configurations are refused, and the remedies."""
