"""The pages that people read in a browser: server-rendered, with one small script for what moves."""
