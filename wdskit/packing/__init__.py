"""Write shards with an index (`pack`, `reshard`), and mark chosen samples in a column of bool (`select`)."""
