"""A folder whose samples have an image, a mask, boxes and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from images import image_bytes
from shards import png_of, write_shard

import wdskit

SCRIPT = "<script>document.title = 'run'</script>"
IMG = '"><img src=x onerror="document.title = \'run\'">'
NUM_SAMPLES = 60


def write_samples(folder: Path) -> Path:
    """Write two shards, an index and classes.json; the texts of the first sample are markup."""
    mask = np.zeros((8, 12), dtype=np.uint8)
    mask[2:5, 3:6] = 7
    for shard in range(2):
        samples = {}
        for number in range(shard * NUM_SAMPLES // 2, (shard + 1) * NUM_SAMPLES // 2):
            label = SCRIPT if number == 0 else f"thing {number % 3}"
            boxes = [{"bbox": [1, 2, 3 + number % 2, 4], "category": label}]
            document = {"annotations": boxes, "number": number, "note": IMG, SCRIPT: "\u202e\x1b[31m"}
            key = (
                f"k{number:03d}" if number else f"k{SCRIPT.replace('/', '|').replace('.', ':')}{IMG.replace('.', ':')}"
            )
            samples[key] = {
                "cls": b"%d" % (number % 2),
                "jpg": image_bytes(number=number),
                "json": json.dumps(document).encode(),
                "seg.png": png_of(mask),
                "txt": IMG.encode(),
                "bin": b"\x00<b>",
            }
        folder.mkdir(exist_ok=True)
        write_shard(folder / f"s-{shard}.tar", samples)
    (folder / "classes.json").write_text(json.dumps([IMG, "dog"]))
    wdskit.index_folder(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed folder of `NUM_SAMPLES` samples. Tests must not change it."""
    return write_samples(tmp_path_factory.mktemp("view") / "train")
