"""Guided search: predictions, corrected by the measurements of the trials so far."""
