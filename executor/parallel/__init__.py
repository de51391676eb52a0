"""The model and how ranks divide it: tensor, sequence, context, pipeline and expert parallelism, checkpointing, graphs."""
