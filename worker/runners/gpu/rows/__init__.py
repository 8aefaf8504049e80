"""What is done to the rows of a step one by one: embedding, gathering, norms, SwiGLU, rotation."""
