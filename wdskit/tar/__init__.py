"""The tar format: a strict reader and a deterministic writer."""
