"""Configurations: read YAML to checked settings, describe invalid settings, and write settings as YAML."""
