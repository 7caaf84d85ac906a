"""Writes shards with webdataset's ShardWriter: from a JSON file of [key, {field: text}], to a pattern."""

import json
import sys
from pathlib import Path

import webdataset

with webdataset.ShardWriter(sys.argv[2], maxcount=3, verbose=0, **json.loads(sys.argv[3])) as writer:
    for key, fields in json.loads(Path(sys.argv[1]).read_text()):
        writer.write({"__key__": key, **{name: text.encode("latin-1") for name, text in fields.items()}})
print(webdataset.__version__)
