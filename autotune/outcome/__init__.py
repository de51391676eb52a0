"""What a job has found so far: its rows, how configurations compare, the verdict, the best configuration."""
