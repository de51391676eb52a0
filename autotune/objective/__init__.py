"""What best means: ranking, intervals, the front of throughput and memory."""
