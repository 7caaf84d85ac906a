"""The imports of the fork server. Workers inherit these modules, and need not import them."""

import signal

import wdskit.loader.worker  # noqa: F401

# A cluster sends SIGTERM to all processes of a job. The fork server ends with the main process, as the workers do.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
