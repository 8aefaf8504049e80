"""Several models in turn: which one is loaded next, and when the one that is loaded gives way."""
