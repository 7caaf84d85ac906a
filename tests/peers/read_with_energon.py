"""Print, as JSON, what Megatron-Energon reads from each folder by its `.nv-meta`: for each split with shards a list of
samples with key and the sha256 of each field; or the error.
"""

import hashlib
import json
import logging
import sys

logging.disable(logging.CRITICAL)

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_val_dataset,
    stateless,
)


@edataclass
class Row(Sample):
    name: str
    fields: dict


@stateless
def cook(sample):
    fields = {name: sha256(as_bytes(data)) for name, data in sample.items() if not name.startswith("__")}
    return Row(**basic_sample_keys(sample), name=sample["__key__"], fields=fields)


def as_bytes(data):
    return data if isinstance(data, bytes) else bytes(data)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Encoder(DefaultTaskEncoder):
    decoder = None
    cookers = [Cooker(cook)]

    def batch(self, samples):
        return samples


def read(folder, part):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(folder, split_part=part, worker_config=config, batch_size=1, task_encoder=Encoder())
    return [[sample.name, sample.fields] for batch in get_savable_loader(dataset) for sample in batch]


def attempt(job):
    try:
        return {part: read(job["folder"], part) for part in job["parts"]}
    except BaseException as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(job) for job in json.loads(sys.argv[1])]))
