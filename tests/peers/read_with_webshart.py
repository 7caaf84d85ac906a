"""Prints what webshart reads of each folder by the JSON beside its shards, as JSON: a list of files with the sha256 of
their bytes; or why it fails.
"""

import hashlib
import json
import sys

import webshart


def read(folder):
    dataset = webshart.discover_dataset(source=folder)
    files = []
    for shard in range(dataset.num_shards):
        reader = dataset.open_shard(shard)
        names = dataset.list_files_in_shard(shard)
        files += [[name, hashlib.sha256(bytes(reader.read_file(at))).hexdigest()] for at, name in enumerate(names)]
    return files


def attempt(folder):
    try:
        return read(folder)
    except BaseException as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(folder) for folder in json.loads(sys.argv[1])]))
