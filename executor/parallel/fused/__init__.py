"""Third-party kernels that replace operators of our modules (`fused_kernels`)."""
