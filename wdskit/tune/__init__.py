"""What looks at a pipeline before a run: `wdskit.plan` and `wdskit.bench`."""
