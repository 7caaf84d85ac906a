"""The contestants of bench_peers.py, one file each, and what they share.

A contestant has `open_(job)`, whose result gives an epoch's batches at each call, `PACKAGES`, whose versions are shown,
and `prepare(job)` where it reads a format of its own. `python -m peers.harness NAME JOB` runs it (`job.Job` as JSON)
and prints its result as JSON, often in a virtual environment of its own: so what it shares with the driver needs numpy,
torch and psutil only.
"""
