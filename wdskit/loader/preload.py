"""The imports of the fork server. Workers inherit the imported modules, and need not import them again."""

import signal

import wdskit.loader.worker  # noqa: F401

# A cluster sends SIGTERM to all processes of a job. The fork server ends with the main process, as the workers do.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
