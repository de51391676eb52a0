"""The measurements of a trial: time, memory, communication, FLOPs."""
