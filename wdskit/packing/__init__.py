"""Write shards with an index (`pack`, `reshard`), and store a choice of their samples as a column (`select`)."""
