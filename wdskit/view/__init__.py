"""A page on this machine that shows the samples of shards: `wdskit view`."""
