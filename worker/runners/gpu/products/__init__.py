"""Products with weights: every way to compute one, and which of them is taken."""
