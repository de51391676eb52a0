"""What a job is predicted to find, before its first trial."""
