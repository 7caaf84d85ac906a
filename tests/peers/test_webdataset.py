"""webdataset reads wdskit's shards, writes shards that wdskit reads, and each runs inside the other's pipelines.

`test_peers.py` runs this file a second time, with the oldest webdataset that is supported.
"""

from __future__ import annotations

import gc
import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
import webdataset
from folders import ALL
from images import image_bytes
from packed import KINDS, Packed, pack_all
from PIL import Image
from reading import check_read, fields_of
from shards import even, listed, number_of

from wdskit import Pipeline, ShardError

# webdataset does not close its files; the garbage collector does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SPECS = ["l8", "l", "rgb8", "rgb", "rgba8", "pil", "pilrgb", "torchrgb8", "torchrgb"]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_open():
    """Close the last of these files while their warning is not an error."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict[str, Packed]:
    return pack_all(tmp_path_factory.mktemp("packed"))


def plain(value):
    """Return arrays, tensors and images as lists with their types, so that `==` compares all values."""
    match value:
        case dict():
            return {name: plain(part) for name, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case np.ndarray() | torch.Tensor():
            return [type(value).__name__, str(value.dtype), value.tolist()]
        case Image.Image():
            return [value.mode, value.size, value.tobytes()]
    return value


# Shards of wdskit.


@pytest.mark.parametrize("kind", KINDS)
def test_web_dataset_reads_what_pack_wrote(packed, kind):
    shards = packed[kind].shards
    braces = f"{shards[0].removesuffix('0.tar')}{{0..{len(shards) - 1}}}.tar"
    for dataset in (
        webdataset.WebDataset(shards, shardshuffle=False),
        webdataset.WebDataset(braces, shardshuffle=False),
        webdataset.DataPipeline(webdataset.SimpleShardList(shards), webdataset.tarfile_to_samples()),
    ):
        assert [fields_of(sample) for sample in dataset] == list(packed[kind].samples.items())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["images", "table", "rows"])
def test_decoding_means_the_same_on_both_sides(packed, kind, spec):
    theirs = webdataset.WebDataset(packed[kind].shards, shardshuffle=False).decode(spec)
    ours = Pipeline().stream(packed[kind].shards, shuffle_shards=False).decode(spec)
    assert plain([fields_of(sample) for sample in ours.build()]) == plain([fields_of(sample) for sample in theirs])


# Shards of webdataset.

SAMPLES = {
    key: {"jpg": image_bytes(number=number), "json": b'{"n": %d}' % number, "txt": b"" if number % 2 else b"text"}
    for number, key in enumerate(
        [
            "plain",
            "a/folder",
            "n" * 96,
            "n" * 97,
            "x" * 200,
            "d" * 90 + "/d",
            "雪/ä",
            ("雪" * 60 + "/") * 3 + "k",
            "a b",
        ]
    )
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mtime": 0},
        {"mtime": 12345.5},
        {"mtime": -1, "user": "jürgen", "group": "büro", "mode": 0},
        {"compress": False, "encoder": False},
        {"maxcount": 2},
        {"maxsize": 1000},
    ],
    ids=str,
)
def test_what_shard_writer_wrote_is_read(tmp_path, options):
    with webdataset.ShardWriter(str(tmp_path / "a-%06d.tar"), verbose=0, **{"maxcount": 4, **options}) as writer:
        for key, fields in SAMPLES.items():
            writer.write({"__key__": key, **fields})
    assert len(list(tmp_path.iterdir())) > 2
    check_read(tmp_path, SAMPLES)


def test_values_that_tar_writer_encoded_are_decoded(tmp_path):
    """Fields that TarWriter pickles stay bytes."""
    values = {
        "cls": 7,
        "json": {"text": "grüße", "list": [1, 2.5, None]},
        "npy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "png": np.arange(36, dtype=np.uint8).reshape(3, 4, 3),
        "pyd": {"a": 1},
        "txt": "雪",
        "_meta": "kept",
    }
    with (tmp_path / "a.tar").open("wb") as file, webdataset.TarWriter(file, keep_meta=True) as writer:
        writer.write({"__key__": "k", **values})
    with tarfile.open(tmp_path / "a.tar") as archive:
        stored = {info.name.removeprefix("k."): archive.extractfile(info).read() for info in archive}
    check_read(tmp_path, {"k": stored})
    (sample,) = Pipeline().stream(str(tmp_path / "a.tar")).decode("rgb8").build()
    expected = {**values, "pyd": stored["pyd"], "_meta": b"kept"}
    assert plain(fields_of(sample)[1]) == plain(dict(sorted(expected.items())))


def test_shards_that_it_compressed_are_refused_by_name(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "a-%06d.tar"), verbose=0, compress=True) as writer:
        writer.write({"__key__": "k", "jpg": np.random.default_rng(0).bytes(5000)})
    with pytest.raises(ShardError, match="this is a gzip file, not a tar"):
        list(Pipeline().stream(str(tmp_path / "a-000000.tar")).build())


def test_the_folders_of_img2dataset_are_read(tmp_path):
    """Such folders have numbered shards, keys of nine digits, indented JSON, and foreign tables next to the shards."""
    samples = {}
    for shard in range(2):
        with (tmp_path / f"{shard:05d}.tar").open("wb") as file, webdataset.TarWriter(file) as writer:
            for number in range(3):
                key = f"{shard:05d}{number:04d}"
                meta = json.dumps({"url": "http://x/ü", "key": key, "status": "success", "exif": "{}"}, indent=4)
                sample = {"jpg": image_bytes(number=number), "txt": f"caption {number}", "json": meta}
                writer.write({"__key__": key, **sample})
                samples[key] = {
                    name: data if isinstance(data, bytes) else data.encode() for name, data in sorted(sample.items())
                }
        (tmp_path / f"{shard:05d}_stats.json").write_text('{"count": 3, "successes": 3}')
        (tmp_path / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    check_read(tmp_path, samples)


# webdataset's stages in wdskit's streams.


def plus_100(number):
    return number + 100


def as_column(number):
    return (number,)


THEIRS_AND_OURS = {
    "map": (lambda p: p.stage(webdataset.map(number_of)), lambda p: p.map(number_of)),
    "select": (lambda p: p.stage(webdataset.select(even)), lambda p: p.select(even)),
    "rename": (lambda p: p.stage(webdataset.rename(label="cls;id")), lambda p: p.rename(label="cls;id")),
    "map_dict": (lambda p: p.stage(webdataset.map_dict(cls=int)), lambda p: p.map_dict(cls=int)),
    "to_tuple": (
        lambda p: p.stage(webdataset.to_tuple("__key__", "id;cls")),
        lambda p: p.to_tuple("__key__", "id;cls"),
    ),
    "map_tuple": (
        lambda p: p.to_tuple("cls", "__key__").stage(webdataset.map_tuple(int, str)),
        lambda p: p.to_tuple("cls", "__key__").map_tuple(int, str),
    ),
    "extract_keys": (lambda p: p.stage(webdataset.extract_keys("*cls")), lambda p: p.to_tuple("cls")),
    "decode": (lambda p: p.stage(webdataset.decode()), lambda p: p.decode()),
    "unbatched": (
        lambda p: p.to_tuple("cls").batched(4).stage(webdataset.unbatched()),
        lambda p: p.to_tuple("cls"),
    ),
    "batched": (
        lambda p: p.map(number_of).map(as_column).stage(webdataset.batched(4, partial=False)),
        lambda p: p.map(number_of).map(as_column).batched(4, partial=False),
    ),
    "several": (
        lambda p: p.map(number_of).stage(webdataset.map(plus_100)).select(bool),
        lambda p: p.map(number_of).map(plus_100).select(bool),
    ),
}


@pytest.mark.parametrize(
    ("stage", "workers"),
    [*((stage, 0) for stage in THEIRS_AND_OURS), ("batched", 2), ("several", 2)],
)
def test_its_stage_does_in_a_stream_what_ours_of_that_name_does(six, stage, workers):
    theirs, ours = (add(listed(six)) for add in THEIRS_AND_OURS[stage])
    expected = [as_lists(value) for value in ours.loader(workers=workers)]
    assert expected
    assert [as_lists(value) for value in theirs.loader(workers=workers)] == expected


def as_lists(value):
    """Return batches of numbers as lists: webdataset stacks them with numpy, wdskit with torch."""
    if isinstance(value, (tuple, list)):
        return [part.tolist() if hasattr(part, "tolist") else part for part in value]
    return value


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_behind_its_shuffle_the_stream_goes_on_from_epoch_to_epoch(six, workers):
    loader = listed(six).stage(webdataset.shuffle(7)).map(number_of).with_epoch(13).loader(workers=workers)
    epochs = [list(loader) for _ in range(12)]
    assert [len(epoch) for epoch in epochs] == [13] * 12
    assert set(itertools.chain(*epochs)) == set(range(39))
    assert len(set(map(tuple, epochs))) == 12


# wdskit's pipelines in webdataset's.


def test_a_built_pipeline_is_one_of_its_own(six):
    built = listed(six).map(number_of).build()
    assert isinstance(built, webdataset.DataPipeline)
    assert list(built.compose(webdataset.map(plus_100))) == list(range(100, 139))
    assert list(built) == list(range(39))
    built.append(webdataset.map(plus_100))
    assert list(built) == list(range(100, 139))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start_method", ["fork", "spawn"] if ALL else ["fork"])
def test_web_loader_runs_it(six, workers, start_method):
    context = start_method if workers else None
    loader = webdataset.WebLoader(
        listed(six).map(number_of).build(), batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    for _ in range(2):
        assert sorted(map(int, loader)) == list(range(39))


def test_web_loader_counts_the_epochs_of_a_stream_that_goes_on(six):
    built = Pipeline().stream(six, seed=3).split_by_worker().shuffle(6).map(number_of).with_epoch(13).build()
    loader = webdataset.WebLoader(built, batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [list(map(int, loader)) for _ in range(9)]
    assert [len(epoch) for epoch in epochs] == [13] * 9
    assert set(itertools.chain(*epochs)) == set(range(39))
    built.set_epoch(0)
    assert [list(map(int, loader)) for _ in range(9)] == epochs


def test_newest_version_nests_pipelines(six):
    """Versions 0.2.86 to 0.2.100 cannot nest their own pipelines either."""
    built = listed(six).build()
    nested = webdataset.DataPipeline(built, webdataset.map(number_of), webdataset.map(as_column), webdataset.batched(5))
    assert [batch[0].tolist() for batch in nested] == [list(range(at, min(at + 5, 39))) for at in range(0, 39, 5)]
    fluid = webdataset.FluidWrapper(listed(six).build()).map(number_of).select(bool)
    assert list(fluid) == list(range(1, 39))
