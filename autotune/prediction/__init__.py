"""Time and memory of a training step before it is run: equations over whole arrays of configurations."""
