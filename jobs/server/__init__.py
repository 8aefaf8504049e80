"""The HTTP server: every request becomes a job in SQL, and its answer is read from there."""
