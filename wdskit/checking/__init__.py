"""`wdskit verify`: are the shards, their indexes and what stands in them as they should be?"""
