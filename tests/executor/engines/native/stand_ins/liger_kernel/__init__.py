"""Stands in for liger_kernel where no GPU is: pure torch, with the signatures of 0.8.5, and what its kernels overwrite."""
