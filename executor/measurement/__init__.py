"""What a trial measures: time, memory, communication, FLOPs."""
