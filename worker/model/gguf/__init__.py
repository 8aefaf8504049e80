"""GGUF files: a header that is checked before it is believed, and typed access to keys and tensors."""
