"""The stages of a pipeline, one class each."""
