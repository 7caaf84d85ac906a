"""Print, as JSON, what Hugging Face datasets reads from each list of shards, streamed and loaded: keys and fields, the
sha256 for images; or the error.
"""

import hashlib
import json
import sys

import datasets

datasets.disable_progress_bars()


def told(value):
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return hashlib.sha256(value["bytes"]).hexdigest()
    return value


def rows(table):
    for name, feature in table.features.items():
        if type(feature).__name__ == "Image":
            table = table.cast_column(name, datasets.Image(decode=False))
    return [{name: told(value) for name, value in row.items() if name != "__url__"} for row in table]


def load(shards, *, streaming):
    return rows(datasets.load_dataset("webdataset", data_files={"train": shards}, split="train", streaming=streaming))


def both(shards):
    return {"streamed": load(shards, streaming=True), "loaded": load(shards, streaming=False)}


def attempt(shards):
    try:
        return both(shards)
    except Exception as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(shards) for shards in json.loads(sys.argv[1])], default=float))
