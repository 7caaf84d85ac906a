"""A configuration with many stages, and both ways to write every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wdskit.pipeline.settings import Config, load_config

# name: (shorthand, long form); None if the bare name is the shorthand
FORMS: dict[str, tuple[Any, Any]] = {
    "exact": ("a.tar", {"shards": "a.tar", "tail": "drop", "homes": 1}),
    "resampled": ("a.tar", {"shards": "a.tar", "chunk": 64}),
    "sequential": ("a.tar", {"shards": "a.tar", "tail": "pad", "seed": 0}),
    "stream": ("a.tar", {"shards": "a.tar"}),
    "split_by_node": (None, {}),
    "split_by_worker": (None, {}),
    "shuffle": (200, {"size": 200}),
    "select": ("keep", {"fn": "keep"}),
    "decode": ("rgb8", {"images": "rgb8"}),
    "map": ("f", {"fn": "f"}),
    "map_dict": ({"jpg": "f"}, {"jpg": "f"}),
    "map_tuple": (["f", None], {"fns": ["f", None]}),
    "rename": ({"image": "jpg;png"}, {"image": "jpg;png"}),
    "resize": (256, {"size": 256}),
    "center_crop": ([224, 192], {"size": [224, 192]}),
    "random_resized_crop": (224, {"size": 224}),
    "random_flip": (0.25, {"p": 0.25}),
    "normalize": ("imagenet", {"preset": "imagenet"}),
    "to_tensor": (["jpg"], {"fields": "jpg"}),
    "torchvision": (["RandomHorizontalFlip"], {"transforms": ["RandomHorizontalFlip"]}),
    "multi_hot": (
        {"from": "json.labels", "classes": 3},
        {"from": "json.labels", "classes": 3, "to": "multi_hot"},
    ),
    "to_tuple": ("jpg;png cls", {"fields": ["jpg;png", "cls"]}),
    "to_dict": (["jpg;png", "cls"], {"fields": "jpg;png cls"}),
    "batched": (64, {"size": 64}),
    "bucketed": (
        {"by": "aspect", "shapes": [[8, 8], [8, 16]], "global_size": 64},
        {"by": "aspect", "shapes": [[8, 8], [8, 16]], "global_size": 64, "divisor": 8},
    ),
    "resize_to_bucket": (None, {"crop": "center"}),
    "with_epoch": (100, {"n": 100}),
    "with_length": (100, {"n": 100}),
}
TEXT = """\
version: 1
pipelines:
  train:
    - stream: "a-{000..003}.tar"
    - split_by_node
    - shuffle: 200
    - map: f
    - map: {fn: g, global_rng: true}
    - random_flip
    - to_tuple: [jpg, cls]
    - batched: {size: 64, partial: false}
  val:
    - stream: {shards: [b.tar], seed: 5}
loader:
"""


def load(text: str | bytes, folder: Path, *overrides: str) -> Config:
    """Write `text` to a file in `folder` and load it as a configuration."""
    path = folder / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    return load_config(path, overrides=overrides)
