"""A folder of shards: keys, samples, the index, random access."""
