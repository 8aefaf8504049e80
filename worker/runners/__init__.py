"""Arithmetic behind one small interface: the NumPy reference runner and, on a GPU, the CUDA runner."""
