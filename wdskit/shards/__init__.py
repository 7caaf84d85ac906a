"""Operations on finished shards: one module per command, and the modules that several commands use."""
