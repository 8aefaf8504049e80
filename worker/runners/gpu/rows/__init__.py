"""Launchers that work on the rows of a step one by one: embedding, gathering, norms, SwiGLU, rotation."""
