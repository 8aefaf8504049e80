"""Attention: queries, keys and values; decode attention for drawn tokens; prefill attention for prompts."""
