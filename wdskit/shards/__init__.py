"""Operations on finished shards: indexing them, and telling what they hold."""
