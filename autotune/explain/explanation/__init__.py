"""Why the best configuration of a job is the best: what was measured, and, marked as such, what is predicted."""
