"""torch's DistributedDataParallel, a reference for the native engine at stage 0."""
