"""A folder of shards as a data set: keys, samples, the folder's index, columns of values, random access to samples."""
