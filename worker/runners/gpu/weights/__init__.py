"""A model's weights: from the bytes of a file to matrices and vectors on the GPU."""
