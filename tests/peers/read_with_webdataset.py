"""Prints what webdataset reads: for each sample, in order, its key and the sha256 of each field, as JSON."""

import hashlib
import json
import sys
import warnings

import webdataset

warnings.simplefilter("ignore", ResourceWarning)
samples = webdataset.WebDataset(sys.argv[1:], shardshuffle=False)
found = [
    [
        sample["__key__"],
        {name: hashlib.sha256(data).hexdigest() for name, data in sorted(sample.items()) if name[0] != "_"},
    ]
    for sample in samples
]
print(json.dumps({"version": webdataset.__version__, "samples": found}))
