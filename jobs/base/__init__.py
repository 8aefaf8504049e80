"""Shared vocabulary of the client, without I/O: states, settings, ids, times, URLs, signatures."""
