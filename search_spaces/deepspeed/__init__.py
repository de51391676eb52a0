"""DeepSpeed's configuration: written, read and checked."""
