"""Web pages for people: server-rendered, with one small script for moving parts."""
