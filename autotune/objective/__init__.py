"""The objective: ranking, intervals, the Pareto front of throughput and memory."""
