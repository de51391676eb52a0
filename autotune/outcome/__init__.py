"""The result of a job so far: its rows, the comparison of configurations, the verdict, the best configuration."""
