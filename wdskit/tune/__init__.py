"""Plan and measure a pipeline before a run: `wdskit.plan` and `wdskit.bench`."""
