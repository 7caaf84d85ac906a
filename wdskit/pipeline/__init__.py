"""Pipelines: descriptions of one source and its stages, and their running form, a `webdataset.DataPipeline`."""
