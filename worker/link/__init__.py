"""The engine's process, and the typed messages to it and from it."""
