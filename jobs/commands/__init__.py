"""The `nightmill` command: a thin layer over the client, with all printing."""
