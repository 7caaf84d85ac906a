"""What a data set holds, counted in one pass and bounded memory: `wdskit stats`."""
