"""torch's DistributedDataParallel, to hold the native engine against at stage 0."""
