"""Predictions for a job before its first trial."""
