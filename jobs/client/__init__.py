"""The class behind the functions of `nightmill.jobs`."""
