"""The executor: makes the samples and batches of a built pipeline."""
