"""Kernels of others' packages in the place of operators of our modules (`fused_kernels`)."""
