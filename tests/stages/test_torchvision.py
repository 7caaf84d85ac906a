"""torchvision's transforms as a stage: boxes, masks and keypoints agree with a drawn reference."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import HastyDisk, on
from PIL import Image, ImageDraw
from with_torchvision import FOLDER, make_importable

from wdskit import Pipeline, PipelineError, Ragged, SampleError, load_config, pack
from wdskit.errors import ConfigError

make_importable()

assert FOLDER.is_dir(), "run `make setup`"

SIZE = 96


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw(number: int) -> dict[str, Any]:
    """Return a sample with a box in image and mask, and its corners as keypoints; every seventh sample has no box."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.integers(60, 120, 2))
    image, mask = Image.new("RGB", (width, height)), Image.new("L", (width, height))
    boxes, labels, points = [], [], []
    if number % 7:
        x, y = int(rng.integers(2, width // 2)), int(rng.integers(2, height // 2))
        w, h = int(rng.integers(8, width - x - 1)), int(rng.integers(8, height - y - 1))
        ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), fill=(255, 255, 255))
        ImageDraw.Draw(mask).rectangle((x, y, x + w - 1, y + h - 1), fill=1)
        boxes, labels, points = [[x, y, w, h]], [number % 5], [[x, y], [x + w, y + h]]
    document = {"boxes": boxes, "labels": labels, "points": points, "ragged": [[1, 2, 3, 4], [1]]}
    return {"__key__": f"k{number:04d}", "png": png(image), "seg.png": png(mask), "json": document, "cls": number % 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("torchvision") / "data"
    on(HastyDisk(), pack, [draw(number) for number in range(500)], folder, max_samples=300)
    return str(folder)


FIELDS = {
    "png": "image", "seg.png": "mask", "json.boxes": {"boxes": "xywh"}, "json.labels": "labels",
    "json.points": "keypoints",
}  # fmt: skip
NAMES = ["png", "seg.png", "json.boxes", "json.labels", "json.points", "__key__"]


def source(folder: str, **settings: Any) -> Pipeline:
    pipe = Pipeline().exact(folder, **{"tail": "drop", "seed": 3, **settings})
    return pipe.decode("rgb8", only=["png", "json", "cls"]).decode("index", only="seg.png")


def test_crops_flips_and_resizes_move_boxes_masks_and_keypoints_as_the_image(folder: str):
    transforms = [
        {"RandomResizedCrop": {"size": SIZE, "scale": [0.3, 1.0], "antialias": True}}, "RandomHorizontalFlip",
        {"RandomVerticalFlip": {"p": 0.3}}, "ClampBoundingBoxes", {"SanitizeBoundingBoxes": {"min_size": 2}},
    ]  # fmt: skip
    pipe = source(folder).torchvision(transforms=transforms, fields=FIELDS).to_dict(*NAMES).batched(50)
    seen = with_box = dropped = 0
    for batch in pipe.loader(workers=0):
        images, masks = batch["png"], batch["seg.png"]
        assert images.shape == (50, 3, SIZE, SIZE)
        assert isinstance(batch["json.boxes"], Ragged)
        for at, key in enumerate(batch["__key__"]):
            boxes, labels = batch["json.boxes"][at], batch["json.labels"][at]
            assert len(boxes) == len(labels)
            assert boxes.shape[1:] == (4,)
            pixels, marks = images[at, 0].numpy() / 255, masks[at].reshape(SIZE, SIZE).numpy()
            assert np.abs((pixels > 0.5).astype(int) - marks).sum() <= 5 * SIZE  # only blurred edges
            seen += 1
            dropped += not len(boxes) and int(key[1:]) % 7 > 0
            if not len(boxes):
                assert (marks.sum(axis=0) > 0).sum() <= 3 or (marks.sum(axis=1) > 0).sum() <= 3 or not marks.any()
                continue
            with_box += 1
            assert labels.tolist() == [int(key[1:]) % 5]
            x, y, w, h = boxes[0].tolist()
            rows, columns = np.flatnonzero(marks.any(axis=1)), np.flatnonzero(marks.any(axis=0))
            found = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert np.abs(np.array(found) - [x, y, x + w, y + h]).max() <= 3
            points = batch["json.points"][at].numpy()
            left, right = sorted(points[:, 0].clip(0, SIZE))
            top, bottom = sorted(points[:, 1].clip(0, SIZE))
            assert np.abs(np.array([left, top, right, bottom]) - [x, y, x + w, y + h]).max() <= 1.5
    assert seen == 500
    assert with_box > 350
    assert dropped > 0


def digests(pipe: Pipeline, **options: Any) -> dict[str, str]:
    found = {}
    for batch in pipe.loader(**options):
        for at, key in enumerate(batch["__key__"]):
            found[key] = hashlib.sha256(batch["png"][at].numpy().tobytes()).hexdigest()
    return found


def test_random_numbers_follow_from_the_position_alone(folder: str):
    transforms = [{"RandomCrop": 40}, {"ColorJitter": {"brightness": 0.4}}, "RandAugment"]
    transforms[0] = {"RandomCrop": {"size": 40, "pad_if_needed": True}}
    pipe = source(folder, range=[0, 200]).torchvision(transforms=transforms, fields={"png": "image"})
    pipe = pipe.to_dict("png", "__key__").batched(20)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    expected = digests(pipe, workers=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(expected.values())) > 100
    for options in ({"workers": 1, "threads": 3, "start_method": "fork"}, {"workers": 2, "start_method": "fork"}):
        assert digests(pipe, **options) == expected
    ranks = [digests(pipe, workers=0, rank=rank, world_size=2) for rank in range(2)]
    assert {**ranks[0], **ranks[1]} == expected
    with pytest.raises(PipelineError, match="several threads would draw from the generators of your program"):
        pipe.loader(workers=0, threads=3)
    other = source(folder, range=[0, 200], seed=4).torchvision(transforms=transforms, fields={"png": "image"})
    assert digests(other.to_dict("png", "__key__").batched(20), workers=0) != expected


def test_ready_transforms_pillow_images_and_an_only_mask_are_taken(folder: str):
    from torchvision.transforms import v2

    pipe = Pipeline().sequential(folder, range=[0, 8])
    masks = pipe.decode("index").to_dict("seg.png").map_dict(**{"seg.png": lambda ids: ids.astype(">i4")})
    inverted = masks.torchvision([{"RandomInvert": {"p": 1.0}}]).loader(workers=0)  # which changes images only
    assert all(sample["seg.png"].max() <= 1 for sample in inverted)
    pipe = pipe.decode("pil", only="png").decode(only="cls")
    pipe = pipe.torchvision(transforms=[v2.Resize((20, 30)), v2.ToImage()], fields={"jpg;png": "image"})
    [batch] = pipe.to_dict("png").batched(8).loader(workers=0)
    assert batch["png"].shape == (8, 3, 20, 30)
    assert batch["png"].dtype == torch.uint8


REFUSED = [
    (["Lambda"], "Lambda: .* missing 1 required positional argument: 'lambd'"),
    ([{"Resize": 224}], "Resize: 'int' object is not iterable"),
    (["RandomFlop"], "`RandomFlop` is not a transform of torchvision.transforms.v2"),
    ([{"Resize": {"sise": 3}}], "Resize: .* unexpected keyword argument 'sise'"),
    ([{"Resize": {"size": 3, "interpolation": "best"}}], "Resize: 'best' is not a valid InterpolationMode"),
    ([{"ToDtype": {"dtype": "load"}}], "ToDtype: dtype must be a dict or a torch.dtype"),
    ([], "at least 1 item"),
    ([3], "3 is not a transform of torchvision"),
    ([{"RandomApply": {"transforms": ["RandomFlop"]}}], "RandomApply: `RandomFlop` is not a transform"),
]


@pytest.mark.parametrize(("transforms", "told"), REFUSED)
def test_what_is_no_transform_is_refused_with_the_line(transforms: Any, told: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=told):
        Pipeline().exact("data").torchvision(transforms=transforms)
    path = tmp_path / "c.yaml"
    import yaml

    text = yaml.safe_dump({"transforms": transforms}, default_flow_style=True, width=1000).strip()
    path.write_text(f"version: 1\npipeline:\n  - exact: data\n  - decode: rgb8\n  - torchvision: {text}\n")
    with pytest.raises(ConfigError, match=rf"c.yaml:5: pipeline\[2\].torchvision.transforms: .*{told}"):
        load_config(path)


def test_names_of_nested_transforms_dtypes_and_modes_are_values(folder: str):
    size = [8, 9]
    plain = [{"Resize": {"size": size}}]
    transforms = [
        {"RandomChoice": {"transforms": [{"Resize": {"size": size, "interpolation": "nearest"}}, *plain]}},
        {"ToDtype": {"dtype": "float32", "scale": True}},
    ]  # fmt: skip
    pipe = source(folder, range=[0, 10]).torchvision(transforms=transforms, fields={"png": "image"})
    [(images,)] = pipe.to_tuple("png").batched(10).loader(workers=0)
    assert images.shape == (10, 3, 8, 9)
    assert images.dtype == torch.float32
    assert float(images.max()) <= 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"png": "picture"}, "Input should be 'image', 'mask', 'labels' or 'keypoints', not `picture`"),
        ({"png": {"boxes": "wh"}}, "Input should be 'xywh', 'xyxy' or 'cxcywh'"),
        ({}, "fields: "),
        (["png"], "fields: Input should be a valid dictionary"),
    ],
)
def test_fields_of_no_kind_are_refused(fields: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        Pipeline().exact("data").torchvision(transforms=["RandomHorizontalFlip"], fields=fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"nope": "image"}, "no field `nope`"),
        ({"png": "image", "json.nope": "labels"}, "no field `json.nope`"),
        ({"png": "image", "json.ragged": {"boxes": "xywh"}}, "`json.ragged`: setting an array element with a sequence"),
        ({"png": "image", "json.labels": {"boxes": "xywh"}}, r"`json.labels` has the shape \(1,\), not \(number, 4\)"),
        ({"json.boxes": {"boxes": "xywh"}}, "`json.boxes` needs the size of an image"),
        ({"cls": "image"}, "`cls` is not an image but int"),
    ],
)
def test_fields_of_another_kind_are_the_error_of_the_sample(folder: str, fields: Any, told: str):
    pipe = source(folder, range=[1, 5]).torchvision(transforms=["RandomHorizontalFlip"], fields=fields)
    with pytest.raises(SampleError, match=told):
        list(pipe.loader(workers=0))


@pytest.mark.parametrize("is_object", [True, False])
def test_all_labels_are_filtered_with_the_boxes(folder: str, is_object: bool):
    from torchvision.transforms import v2

    fields = {"png": "image", "json.boxes": {"boxes": "xywh"}, "json.labels": "labels", "labels": "labels"}
    sanitize = (
        v2.Compose([v2.SanitizeBoundingBoxes(min_size=40)])
        if is_object
        else {"SanitizeBoundingBoxes": {"min_size": 40}}
    )
    pipe = source(folder, range=[0, 100]).map(lambda sample: {**sample, "labels": sample["json"]["labels"]})
    kept = 0
    for sample in pipe.torchvision(fields=fields, transforms=[sanitize]).loader(workers=0):
        large = [min(box[2:]) >= 40 for box in sample["json"]["boxes"]]
        expected = [label for label, is_large in zip(sample["json"]["labels"], large, strict=True) if is_large]
        assert len(sample["json.boxes"]) == len(expected)
        assert sample["json.labels"].tolist() == sample["labels"].tolist() == expected
        kept += len(expected)
    assert 0 < kept < 100
