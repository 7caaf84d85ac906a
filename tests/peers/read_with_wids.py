"""Print, as JSON, what wids reads by each index: the key and the sha256 of each field of each sample, by number; or
the error.
"""

import hashlib
import io
import json
import sys
import warnings

import wids

warnings.simplefilter("ignore", ResourceWarning)


def read(index, cache_dir):
    dataset = wids.ShardListDataset(index, cache_dir=cache_dir, keep=True, transformations=[])
    return [told(dataset[number]) for number in range(len(dataset))]


def told(sample):
    fields = {
        name.lstrip("."): hashlib.sha256(data.read() if isinstance(data, io.IOBase) else data).hexdigest()
        for name, data in sample.items()
        if name[0] != "_"
    }
    return [sample["__key__"], fields]


def attempt(index, cache_dir):
    try:
        return read(index, cache_dir)
    except BaseException as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(index, f"{sys.argv[1]}/{number}") for number, index in enumerate(sys.argv[2:])]))
