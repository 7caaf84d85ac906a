"""The local page of `wdskit view`, which shows the samples of shards, and the report of `wdskit stats --html`."""
