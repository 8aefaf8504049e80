"""The Nightmill worker: owns one GPU (or the NumPy reference runner) and turns claimed jobs into text."""
