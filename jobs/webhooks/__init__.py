"""Calls to URLs that somebody named, once a batch has ended: signed, kept in SQL, tried until taken."""
