"""Configurations: YAML to checked settings, the messages about them, and back to YAML."""
