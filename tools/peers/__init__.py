"""The contestants of bench_peers.py, one file each, and what they share.

A contestant is a script, `python -m peers.NAME JOB`, that takes a job (`job.Job` as JSON) and prints its result as
JSON. It may run in a virtual environment of its own, so what it shares with the driver needs numpy, torch and psutil
only.
"""
