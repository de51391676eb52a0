"""Why the best configuration of a job is the best, from measurements and from predictions, which are marked as such."""
