"""Print, as JSON, what open_clip's training reads from each pattern of shards: the number of samples in `sizes.json`,
and the texts that it reads; or the error.
"""

import json
import sys
import types
import warnings

warnings.simplefilter("ignore")

import stand_in  # noqa: F401
from open_clip_train import data


def read(pattern):
    size, num_shards = data.get_dataset_size(pattern)
    options = types.SimpleNamespace(
        val_data=pattern,
        val_num_samples=None,
        train_data=None,
        dataset_resampled=False,
        seed=0,
        batch_size=1,
        workers=0,
        world_size=1,
        train_num_samples=None,
        train_data_upsampling_factors=None,
    )
    info = data.get_wds_dataset(options, lambda image: image.size, is_train=False, tokenizer=lambda text: [text])
    texts = [text for batch in info.dataloader for text in batch[1]]
    return {"promised": size, "num_shards": num_shards, "texts": texts}


def attempt(pattern):
    try:
        return read(pattern)
    except BaseException as err:
        return {"error": f"{type(err).__name__}: {err}"}


print(json.dumps([attempt(pattern) for pattern in json.loads(sys.argv[1])]))
