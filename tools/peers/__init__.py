"""The peers of bench_peers.py, one file each, and what they share: common.py, which needs numpy, orjson and torch only.

A peer has `open_epochs(job)`, which gives an epoch's batches at each call, and `prepare(job, folder)` where it reads a
format of its own. `python -m peers.harness MODE JOB` runs it, often in an environment of its own.
"""
