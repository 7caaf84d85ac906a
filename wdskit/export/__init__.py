"""Files beside the shards for other programs that read them: `--also` of `pack`, `reshard` and `index`."""
