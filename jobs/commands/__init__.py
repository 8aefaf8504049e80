"""The `nightmill` command: thin over the client; all that is printed goes through here."""
