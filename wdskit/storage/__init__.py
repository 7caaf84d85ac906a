"""Read and write bytes by URL: local files, http(s), buckets and other object stores. Also the local cache."""
