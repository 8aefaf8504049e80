"""Anthropic's /v1/messages over HTTP."""
