"""The dry run: the real engine on tensors without data, for any rank of any world, in one process."""
