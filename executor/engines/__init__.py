"""What a trial runs: `native` is our sharded engine."""
