"""Effects of a configuration on the model and its data: adapters, windows, documents, schedules, states."""
