"""Evaluation: predictions and strategies against tables of measurements, and the published procedures of other tuners."""
