"""Tuning inside a training run: the search takes place in the run's own steps, so that every trial trains the model."""
