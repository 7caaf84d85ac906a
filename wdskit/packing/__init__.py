"""Packing: rows from folders, tables and Python into shards and their index."""
