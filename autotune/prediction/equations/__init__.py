"""The equations: seconds and bytes of a training step, over arrays of configurations."""
