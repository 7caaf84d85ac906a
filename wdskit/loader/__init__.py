"""The loader: it runs a pipeline for one rank, in worker processes, epoch after epoch, and saves its position."""
