"""Products with weights in 16-bit elements: cuBLASLt, and for Hopper kernels whose sums are the same."""
