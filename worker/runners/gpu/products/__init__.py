"""Products with weights: kernels by format, and the choice among them by timing."""
