"""Tuning inside a run: bounded cost, equal weights, recovery from out of memory, overhead."""
