"""Samples of finished shards that are packed again: looked at by their headers, chosen, changed, copied as they are."""
