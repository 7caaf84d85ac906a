"""Stages: what stands in a pipeline, one class each."""
