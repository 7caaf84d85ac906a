"""Print, as JSON, what timm's reader of WebDataset shards reads from each folder by its `_info.json`: for each split
the promised number of samples, and the targets that it reads; or the error.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")


import stand_in  # noqa: F401
from timm.data.readers.reader_wds import ReaderWds


def read(folder, split):
    reader = ReaderWds(folder, name="", split=split, is_training=False, batch_size=1)
    return {"promised": reader.num_samples, "targets": [int(target) for _, target in reader]}


def attempt(job):
    try:
        return {split: read(job["folder"], split) for split in job["splits"]}
    except BaseException as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(job) for job in json.loads(sys.argv[1])]))
