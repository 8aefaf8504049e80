"""The CUDA runner. CUDA's packages are imported only when one is made."""
