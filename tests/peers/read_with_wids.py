"""Prints what wids reads by an index: for each sample, by number, its key and the sha256 of each field, as JSON."""

import hashlib
import io
import json
import sys
import warnings

import wids

warnings.simplefilter("ignore", ResourceWarning)
dataset = wids.ShardListDataset(sys.argv[1], cache_dir=sys.argv[2], keep=True, transformations=[])
found = []
for number in range(len(dataset)):
    sample = dataset[number]
    fields = {
        name.lstrip("."): hashlib.sha256(data.read() if isinstance(data, io.IOBase) else data).hexdigest()
        for name, data in sorted(sample.items())
        if name[0] != "_"
    }
    found.append([sample["__key__"], fields])
print(json.dumps(found))
