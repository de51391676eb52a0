"""Evaluation: predictions and strategies against tables of measurements, and published procedures of other tuners."""
