"""Models by their names: on the Hugging Face Hub, or at a URL; fetched once, kept in the Hub's cache.

`names` and `choice` only deal with words. The other modules need the package `huggingface_hub` (extra `hub`).
"""
