"""Loaders with a real GPU: `device`, `pin_memory`, start methods and NCCL. `make long` runs this file, `make test` does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from shards import write_shard
from simplejpeg import encode_jpeg

from wdskit import Pipeline, gather_valid
from wdskit.shards.index import index_folder

NUM, BATCH, SIDE = 640, 64, 224
CYCLES = 20_000_000  # about 10 ms of a GPU

WAYS = [{"workers": 0}, {"workers": 0, "threads": 4}, {"workers": 2, "threads": 2}]


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    assert torch.cuda.is_available(), "make long WHAT=gpu needs a GPU"
    torch.cuda.init()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> str:
    """Shards with JPEG images of noise under a slope, so that no two images have equal sums, and `cls` their number."""
    folder = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(5)
    slope = np.add.outer(np.arange(300) % 200, np.arange(260) % 200)[..., None] // 4
    for shard in range(4):
        samples = {}
        for number in range(shard * NUM // 4, (shard + 1) * NUM // 4):
            noise = draw.integers(0, 30 + number % 120, (300, 260, 3), dtype=np.uint8)
            pixels = np.ascontiguousarray((slope + noise).astype(np.uint8))
            samples[f"p{number:04d}"] = {"jpg": encode_jpeg(pixels, quality=90), "cls": b"%d" % number}
        write_shard(folder / f"p-{shard:03d}.tar", samples)
    index_folder(folder)
    return str(folder)


ENDINGS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "uint8": lambda pipe: pipe.decode("rgb8").random_resized_crop(SIDE),
    "normalized": lambda pipe: pipe.decode("rgb8").random_resized_crop(SIDE).normalize("imagenet"),
    "0..1": lambda pipe: pipe.decode("rgb").random_resized_crop(SIDE),
}


def pipeline(folder: str, ending: str) -> Pipeline:
    return ENDINGS[ending](Pipeline().exact(folder, seed=3)).to_tuple("jpg", "cls").batched(BATCH)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_on_the_gpu_have_the_numbers_of_the_cpu(photographs, ending, way):
    pipe = pipeline(photographs, ending)
    on_cpu, on_gpu = pipe.loader(workers=0), pipe.loader(device="cuda", **way)
    for _ in range(2):
        for (images, labels), (expected, numbers) in zip(on_gpu, on_cpu, strict=True):
            assert images.is_cuda
            assert labels.is_cuda
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(labels.cpu(), numbers)
            assert images.dtype == expected.dtype
            assert torch.equal(images.cpu(), expected)


# --- page-locked memory


@pytest.mark.parametrize("slow", [True, False])
def test_a_batch_is_whole_when_it_is_read_and_until_it_was_read(photographs, slow):
    """Slow work on the consumer's stream comes before each copy and before each sum."""
    pipe = pipeline(photographs, "uint8")
    expected = [images.double().sum((1, 2, 3)) for images, _ in pipe.loader(workers=0)]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found = []
            for images, _ in pipe.loader(device="cuda", workers=2, threads=4):
                if slow:
                    torch.cuda._sleep(4 * CYCLES)
                found.append(images.double().sum((1, 2, 3)))
                del images, _
            assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_no_more_memory_than_a_few_batches(photographs):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for images, _ in pipeline(photographs, "normalized").loader(device="cuda", workers=2, threads=2):
        images.sum()
    one = images.numel() * 4
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 6 * one, f"{peak / one:.1f} batches"
    del images, _
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < one // 8


# --- the loader's other promises


# --- processes


# --- results of all ranks


@pytest.fixture(params=["nccl", None, "cpu:gloo,cuda:nccl"], ids=str)
def group(request, monkeypatch) -> Iterator[None]:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group(request.param)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_results_on_the_gpu_are_gathered():
    values = torch.arange(4 * 3 * 5 * 2, device="cuda").view(4, 3, 5, 2).float()
    valid = torch.tensor([True, True, True, False])
    kinds = {
        "contiguous": values,
        "channels_last": values.contiguous(memory_format=torch.channels_last),
        "transposed": values[:, 0].transpose(1, 2),
        "every second": values[:, :, ::2],
    }
    for name, rows in kinds.items():
        for mask in (valid, valid.cuda()):
            assert torch.equal(gather_valid(rows, mask), rows[:3]), name
    assert torch.equal(gather_valid(values > 3, valid.cuda()), (values > 3)[:3])
    assert gather_valid(["a", 5, None, "d"], valid) == ["a", 5, None]
