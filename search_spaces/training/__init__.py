"""What a configuration makes of a model and its data: adapters, windows, documents, schedules, states."""
