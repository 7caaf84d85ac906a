"""Pack rows into shards."""
