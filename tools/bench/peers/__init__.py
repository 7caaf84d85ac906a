"""The peers of bench_peers.py, one module each, and their common.py, which needs only numpy, orjson and torch.

A peer has `open_epochs(job)`, which returns a function that returns an epoch's batches at each call, and
`prepare(job, folder)` if it reads a format of its own. `python -m peers.harness MODE JOB` runs a peer, often in an
environment of its own.
"""
