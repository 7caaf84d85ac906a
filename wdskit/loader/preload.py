"""Imported by the fork server, before it starts workers: what each worker would otherwise import by itself."""

import signal

import wdskit.loader.worker  # noqa: F401

# A cluster sends SIGTERM to all processes of a job. The fork server ends with the main process, as the workers do.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
