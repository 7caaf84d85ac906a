"""Compute the order of samples and random numbers from integers. numpy only: no I/O, no torch."""
