"""The loader: a pipeline run in worker processes, with ranks and epochs."""
