"""Describe a pipeline (one source, then stages), check it, and build its running form."""
