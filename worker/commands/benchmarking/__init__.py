"""The parts of `nightmill benchmark`, each in a process of its own that may be cut, and their reports."""
