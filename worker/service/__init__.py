"""A worker's life: messages in, jobs claimed, results written, its end."""
