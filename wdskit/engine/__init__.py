"""The executor: what makes samples and batches of a built pipeline."""
