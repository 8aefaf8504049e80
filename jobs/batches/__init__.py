"""Batches: files, tables and iterables of prompts, submitted, followed and read as a whole."""
