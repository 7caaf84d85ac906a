"""Print, as JSON, the samples that NVIDIA DALI reads on the CPU. A job is a folder and its fields. The result of a job
is a list of samples, with the sha256 of each field that is not empty, or the error.

With `index` DALI uses the `<shard>.idx` next to the shards, otherwise it makes its own index.
"""

import hashlib
import json
import sys
from pathlib import Path

from nvidia.dali import fn, pipeline_def


@pipeline_def
def reader(paths, indexes, fields):
    found = fn.readers.webdataset(
        paths=paths, index_paths=indexes, ext=fields, missing_component_behavior="empty", name="reader"
    )
    return tuple(found) if len(fields) > 1 else found


def read(folder, fields, index):
    paths = sorted(map(str, Path(folder).glob("*.tar")))
    indexes = [path.removesuffix(".tar") + ".idx" for path in paths] if index else []
    pipeline = reader(paths, indexes, fields, batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    pipeline.build()
    samples = []
    for _ in range(pipeline.epoch_size("reader")):
        arrays = [bytes(output.at(0)) for output in pipeline.run()]
        samples.append([None, {name: sha256(data) for name, data in zip(fields, arrays, strict=True) if data}])
    return samples


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def attempt(job):
    try:
        return read(job["folder"], job["fields"], job.get("index", True))
    except Exception as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(job) for job in json.loads(sys.argv[1])]))
