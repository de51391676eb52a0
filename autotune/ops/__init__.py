"""For operators: logs, traces, output files, text for terminals."""
