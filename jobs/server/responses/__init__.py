"""OpenAI's /v1/responses over HTTP."""
