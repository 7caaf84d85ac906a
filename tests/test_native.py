"""The code in C returns what the code in Python returns, or leaves an input to the code in Python."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from digests import digest_of
from folders import REPOSITORY, copy_tracked
from PIL import Image

from wdskit import Pipeline, WdskitError, pack
from wdskit import native as native_module
from wdskit.codecs.images import decode_image
from wdskit.codecs.structure import colour_jpeg_header
from wdskit.engine import reader
from wdskit.native import INTERFACE, native
from wdskit.stages.images import fused, geometry, transforms
from wdskit.stages.images.fused import Axis, JpegPlan, factors_of
from wdskit.stages.images.transforms import Normalize

MAX_PIXELS = 1 << 24


class Form(NamedTuple):
    """The form of an image: uint8, or float32, perhaps normalized."""

    is_float: bool = True
    normalize: Normalize | None = None

    @property
    def factors(self) -> bytes | None:
        return factors_of(self.normalize) if self.is_float else None


FORMS = {
    "uint8": Form(is_float=False),
    "float": Form(),
    "normalized": Form(normalize=Normalize(preset="imagenet")),
    "normalized by one": Form(normalize=Normalize(mean=[0.4], std=[0.3])),
}
KINDS: dict[str, dict[str, Any]] = {
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "420": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
}

module = native()
needs_native = pytest.mark.skipif(module is None, reason="not built: python setup.py build_ext --inplace")


class WantedPart(NamedTuple):
    rows: Axis
    columns: Axis


def photo(height: int, width: int, *, seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    """Return a JPEG with soft shapes and some noise, similar to a photograph."""
    chance = np.random.default_rng([seed, height, width])
    coarse = Image.fromarray(chance.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse) + chance.normal(0, 6, (height, width, 3))
    stream = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode).save(
        stream, "JPEG", **{"quality": 88, **options}
    )
    return stream.getvalue()


def decode(
    data: bytes, wanted: WantedPart, *, flip: bool = False, form: Form = FORMS["uint8"], size: Any = None
) -> np.ndarray | None:
    """Return the pixels that the module decodes from one file; None if it leaves the file to Python."""
    header = colour_jpeg_header(data, max_pixels=MAX_PIXELS)
    plan = JpegPlan(size or (header.height, header.width), *wanted, flip)
    shape = (wanted.rows.size, wanted.columns.size)
    out = np.full((3, *shape, 3), 77, np.float32 if form.is_float else np.uint8)
    plans = np.array([plan.numbers(9, 1)], np.int64)
    board = np.zeros(3, np.int64)
    [verdict] = module.decode_jpegs([data], plans, out, *shape, form.factors, board)
    assert board.tolist() == [0, 9, 0]
    assert (out[[0, 2]] == 77).all(), "it wrote beside its row"
    return None if verdict else out[1]


def decode_in_python(data: bytes, wanted: WantedPart, *, flip: bool = False, form: Form = FORMS["uint8"]) -> np.ndarray:
    """Return the pixels that the code in Python decodes, at full scale."""
    rows, columns = wanted
    whole = decode_image(data, "rgb8", max_pixels=MAX_PIXELS)
    part = geometry.crop(whole, rows.low, columns.low, rows.high - rows.low, columns.high - columns.low)
    resized = geometry.resize(part, (rows.total, columns.total))
    pixels = resized[rows.skip : rows.skip + rows.size, columns.skip : columns.skip + columns.size]
    pixels = np.ascontiguousarray(pixels[:, ::-1] if flip else pixels)
    if form.normalize is not None:
        return geometry.normalize(pixels, *form.normalize.numbers)
    return np.divide(pixels, np.float32(255), dtype=np.float32) if form.is_float else pixels


# --- which module is used


@pytest.fixture
def again():
    """Let `native` look for the module again, before and after the test."""
    native.cache_clear()
    yield
    native.cache_clear()


@pytest.mark.usefixtures("again")
def test_the_environment_says_whether_it_is_used(monkeypatch, caplog):
    """A module with another interface number is logged and not used; with `require` it is an error."""
    fitting, other = SimpleNamespace(INTERFACE=INTERFACE), SimpleNamespace(INTERFACE=INTERFACE + 1)

    def found(setting: str, candidate: Any) -> Any:
        native.cache_clear()
        monkeypatch.setenv("WDSKIT_NATIVE", setting)
        monkeypatch.setitem(sys.modules, "wdskit._native", candidate)
        return native()

    assert found("", fitting) is found("require", fitting) is fitting
    assert found("0", fitting) is found("", None) is None
    assert not caplog.records
    assert found("", other) is None
    assert f"has interface {INTERFACE + 1}, this version of wdskit needs {INTERFACE}" in caplog.text
    for setting, candidate, told in (
        ("require", None, "wdskit._native.*\n  Install a C compiler and the headers of libjpeg-turbo"),
        ("require", other, "has interface"),
        ("yes", fitting, "WDSKIT_NATIVE=yes: unknown"),
    ):
        with pytest.raises(WdskitError, match=told):
            found(setting, candidate)


# --- images


@needs_native
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_python_to_the_bit(kind, mode):
    """This holds at full scale for parts, sizes, flips, and for results of which only the middle is kept."""
    chance = np.random.default_rng(5)
    for number in range(150):
        height, width = (int(side) for side in chance.integers(8, 90, 2))
        data = photo(height, width, seed=number % 7, mode=mode, **KINDS[kind])

        def axis(side: int) -> Axis:
            low = int(chance.integers(0, side)) * int(chance.integers(0, 4) > 0)
            high = int(chance.integers(low + 1, side + 1))
            size, skip = int(chance.integers(1, 50)), int(chance.integers(0, 12)) * int(chance.integers(0, 2))
            total = max(size + 2 * skip, (high - low) // 2 + 1)  # large enough that no smaller scale is chosen
            return Axis(low, high, total, (total - size) // 2, size)

        wanted, flip = WantedPart(axis(height), axis(width)), bool(chance.integers(0, 2))
        ours, theirs = decode(data, wanted, flip=flip), decode_in_python(data, wanted, flip=flip)
        assert ours is not None
        assert np.array_equal(ours, theirs), (number, height, width, wanted, np.abs(ours.astype(int) - theirs).max())


@needs_native
@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_python_to_the_bit(form):
    for size in (1, 3, 7, 8, 9, 224):
        data = photo(300, 280)
        wanted = WantedPart(Axis(7, 290, size, 0, size), Axis(30, 250, size, 0, size))
        if size != 224:
            wanted = WantedPart(Axis(7, 7 + size, size, 0, size), Axis(30, 30 + size, size, 0, size))
        ours, theirs = (each(data, wanted, form=FORMS[form]) for each in (decode, decode_in_python))
        assert ours is not None
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


@needs_native
def test_the_plain_code_gives_what_the_vector_code_gives():
    data = photo(200, 170)
    wanted = WantedPart(Axis(3, 180, 61, 4, 53), Axis(10, 165, 97, 0, 97))
    with_vectors = [decode(data, wanted, flip=True, form=form) for form in FORMS.values()]
    was = module.use_vectors(True)
    try:
        assert module.use_vectors(False) is False
        plain = [decode(data, wanted, flip=True, form=form) for form in FORMS.values()]
    finally:
        assert module.use_vectors(True) is was
    assert all(np.array_equal(first, second) for first, second in zip(with_vectors, plain, strict=True))


@needs_native
def test_pixels_are_within_two_levels_of_pillow_and_45_decibels_at_a_smaller_scale():
    """The crops of photographs are drawn as in training."""
    chance, decibels, worst = np.random.default_rng(2), [], 0
    for number in range(60):
        height, width = (375, 500) if number % 2 else (1200, 1600)
        data = photo(height, width, seed=number % 6, quality=92)
        top, left, rows, columns = transforms.draw_crop(chance, height, width, (0.08, 1), (3 / 4, 4 / 3))
        ours = decode(data, WantedPart(Axis(top, top + rows, 224, 0, 224), Axis(left, left + columns, 224, 0, 224)))
        image = Image.open(io.BytesIO(data)).crop((left, top, left + columns, top + rows))
        theirs = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR)).astype(int)
        assert ours is not None
        if min(rows, columns) < 448:
            worst = max(worst, int(np.abs(ours - theirs).max()))
        else:
            decibels.append(10 * np.log10(255**2 / max(((ours - theirs) ** 2).mean(), 1e-9)))
    assert worst <= 2
    assert len(decibels) > 10
    assert np.median(decibels) > 45


@needs_native
@pytest.mark.parametrize("step", range(1, 40))
def test_damage_anywhere_is_left_to_python(step):
    """This includes rows below the wanted part, which are not decoded; files are cut with and without an end mark."""
    data = photo(96, 80, seed=step, **list(KINDS.values())[step % len(KINDS)])
    wanted = WantedPart(Axis(8, 24, 16, 0, 16), Axis(8, 30, 22, 0, 22))
    assert decode(data, wanted) is not None
    start = data.index(b"\xff\xda") + 14
    cut = data[: start + (len(data) - start) * step // 40]
    assert decode(cut, wanted) is None
    assert decode(data[:-2], wanted) is None
    assert decode(cut + b"\xff\xd9", wanted) is None


@needs_native
def test_an_image_whose_colours_libjpeg_moves_in_a_crop_is_left_to_python():
    """Its Y has eight times the pixels of Cb and Cr. Here, 30 equal blocks of 4:4:4 become 3 units of 10 blocks."""
    file, wanted = io.BytesIO(), WantedPart(Axis(0, 16, 4, 0, 4), Axis(20, 36, 4, 0, 4))
    Image.new("RGB", (80, 8), (128, 128, 128)).save(file, "JPEG", keep_rgb=True)
    frame = file.getvalue().index(b"\xff\xc0") + 5
    file.getbuffer()[frame : frame + 7] = bytes((0, 16, 0, 96, 3, ord("R"), 0x42))
    assert (decode_in_python(file.getvalue(), wanted) == 128).all()
    assert decode(file.getvalue(), wanted) is None


# --- whole loaders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photographs that are decoded at full scale, some grey or CMYK, with JSON, text, arrays and bytes."""
    where = tmp_path_factory.mktemp("native") / "train"

    def row(number: int) -> dict[str, Any]:
        data = photo(30 + number % 9, 34 + number % 5, seed=number, mode={3: "L", 7: "CMYK"}.get(number % 11, "RGB"))
        array = io.BytesIO()
        np.save(array, np.arange(number % 4 + 1, dtype=np.float32))
        return {
            "__key__": f"{number:04d}", "jpg": data, "cls": number % 7, "json": {"n": number, "t": "ä" * (number % 3)},
            "txt": f"line {number}", "bin": bytes([number % 256]) * (number * 37 % 900), "npy": array.getvalue(),
        }  # fmt: skip

    pack(map(row, range(150)), where, max_samples=40)
    return where


PIPELINES: dict[str, Any] = {
    "uint8": lambda pipe: pipe.decode("rgb8").random_resized_crop(24).random_flip().to_tuple("jpg", "cls").batched(8),
    "float": lambda pipe: pipe.decode("rgb").resize(32).center_crop(28).to_tuple("jpg", "cls").batched(8),
    "normalized": lambda pipe: (
        pipe.decode("rgb8").random_resized_crop([20, 30]).normalize("imagenet").to_tuple("jpg").batched(7)
    ),
    "not decoded": lambda pipe: pipe.to_dict("__key__", "__url__", "bin", "txt").batched(32),
    "columns": lambda pipe: pipe.decode().to_tuple("json", "txt", "cls", "bin", "__key__").batched(9),
    "ragged": lambda pipe: pipe.decode().to_dict("npy", "cls").batched(8, ragged=["npy"]),
    "no batches": lambda pipe: pipe.decode("rgb8").random_resized_crop(24).to_tuple("jpg", "json"),
}


@needs_native
@pytest.mark.parametrize("name", PIPELINES)
def test_batches_are_the_same_with_it_and_without(name, folder, monkeypatch):
    """This holds in the main thread, in threads and in a worker process."""

    def found(**options: Any) -> bytes:
        loader = PIPELINES[name](Pipeline().exact(str(folder), seed=3)).loader(**options)
        return digest_of([batch for _ in range(2) for batch in loader])

    with_it = [found(workers=0), found(workers=0, threads=3), found(workers=1)]
    monkeypatch.setattr(fused, "native", lambda: None)
    monkeypatch.setattr(reader, "read_natively", lambda *_: None)
    assert {found(workers=0), found(workers=0, threads=3), *with_it} == {with_it[0]}


@needs_native
def test_the_native_code_is_what_runs(folder, monkeypatch):
    """Tests that compare results would also pass if the native code never ran."""
    called: list[str] = []

    def noting(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            called.append(name)
            return getattr(module, name)(*arguments)

        return call

    noted = SimpleNamespace(decode_jpegs=noting("decode_jpegs"), read_samples=noting("read_samples"))
    monkeypatch.setattr(fused, "native", lambda: noted)
    monkeypatch.setattr("wdskit.engine.reader.native", lambda: noted)
    for name in ("uint8", "columns"):
        for _ in PIPELINES[name](Pipeline().exact(str(folder), seed=3)).loader(workers=0):
            pass
    assert set(called) == {"decode_jpegs", "read_samples"}


@needs_native
def test_pins_hold_without_it():
    """The batches are those of earlier versions. In these tests, tests/promises/test_orders.py runs with it."""
    environment = {**os.environ, "WDSKIT_NATIVE": "0"}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/promises/test_orders.py"]
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# --- the package


@needs_native
def test_mutated_files_have_one_verdict_and_no_finding_of_the_sanitizers():
    """A part of what `make long WHAT=fuzz` runs."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    words = ["--images", "1500", "--shards", "1500", "--seed", "7", "--sanitize"]
    command = [sys.executable, REPOSITORY / "tools" / "dev" / "fuzz_native.py", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "1,500 images: {" in done.stdout
    assert "'native': " in done.stdout


@needs_native
def test_a_build_of_other_sources_is_noticed():
    assert f"#define INTERFACE {INTERFACE}\n" in (REPOSITORY / "native" / "module.c").read_text()
    assert module.INTERFACE == native_module.INTERFACE


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_the_wheel_has_its_libjpeg_inside(tmp_path):
    """The extension loads no libjpeg of the system. The wheel is for all later versions of Python."""
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler")
    source = copy_tracked(tmp_path / "source")

    def run(*command: Any, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "built", source)
    [built] = (tmp_path / "built").glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", "dist", built, PATH=path)
    [wheel] = (tmp_path / "dist").glob("wdskit-*.whl")
    assert "-cp311-abi3-manylinux" in wheel.name or sys.version_info < (3, 11)
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    maps = run(python, "-c", "import wdskit._native; print(open('/proc/self/maps').read())")
    loaded = {Path(line.split()[-1]) for line in maps.splitlines() if line}
    assert {path.parent.name for path in loaded if path.name.startswith("libjpeg")} == {"wdskit.libs"}
