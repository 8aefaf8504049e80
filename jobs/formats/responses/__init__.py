"""Requests to OpenAI's /v1/responses as jobs, and jobs as its responses. No SQL and no HTTP here."""
