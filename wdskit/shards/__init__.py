"""Operations on finished shards: one command or Python function per file."""
