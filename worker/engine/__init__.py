"""Generation policy: what runs in each step, where its KV pages are, and when a sequence stops."""
