"""The imports of the fork server. Workers inherit the imported modules, and need not import them again."""

from wdskit.loader.worker import ignore_signals

ignore_signals()  # the fork server ends with the main process, as the workers do
