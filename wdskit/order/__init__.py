"""Pure arithmetic of order and randomness: integers in, integers out. numpy only, no I/O, no torch."""
