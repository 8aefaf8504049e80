"""The declared schema, whole. `migrations/` must lead to exactly this (a test compares them)."""

from nightmill.jobs.sql import http_tables, tables

MODULES = (tables, http_tables)
"""Modules that declare tables, each by being imported."""

METADATA = tables.Base.metadata
"""All tables."""
