"""Guided search: predictions, corrected by what the trials so far measured."""
