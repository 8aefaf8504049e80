"""Files and iterables of prompts as wholes: handed in, followed, read."""
