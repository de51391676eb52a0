"""What tuning inside a run does to the run: parts of batches, changes of settings, recovery, agreement of ranks."""
