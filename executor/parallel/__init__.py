"""The model and its parallelism: tensor, sequence, context, pipeline and expert parallelism, checkpointing, CUDA graphs."""
