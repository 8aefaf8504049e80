"""Products with weights in FP8, and the rounding of weights and activations to it."""
