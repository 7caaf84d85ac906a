"""Bytes by URL: local files and http(s)."""
