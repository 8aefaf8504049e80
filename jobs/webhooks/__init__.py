"""Webhooks for ended batches: signed, stored in SQL, retried until delivered."""
