"""Files beside the shards for other programs that read them: `--export` of `pack`, `reshard` and `index`."""
