"""What `nightmill benchmark` is made of: parts, each in a process of its own that may be cut, and reports."""
