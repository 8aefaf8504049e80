"""Streams of texts during generation: pieces from workers through Redis, and their readers."""
