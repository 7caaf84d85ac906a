"""Make a folder of real photographs, of any size, without a download.

    python tools/make_photos.py --num 1600 --seed 1 DEST

Each image is a crop of one of the photographs inside scikit-image's wheel, zoomed, sometimes mirrored, a little lighter
or darker, scaled to about 500x375 as in ImageNet and saved as JPEG with a quality of 75 to 95. The class is the
photograph, so a classifier has something to learn: DEST/<photograph>/<number>.jpg. The same arguments give the same
files.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

# The photographs in the wheel; skimage.data would download all others.
PHOTOS = {
    "astronaut": "astronaut.png",
    "brick": "brick.png",
    "camera": "camera.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "coins": "coins.png",
    "galaxies": "hubble_deep_field.jpg",
    "grass": "grass.png",
    "gravel": "gravel.png",
    "motorcycle": "motorcycle_left.png",
    "rocket": "rocket.jpg",
    "tissue": "ihc.png",
}


def load_photos() -> dict[str, Image.Image]:
    """Return the photographs in RGB by class name, in sorted order."""
    package = importlib.util.find_spec("skimage")  # not imported, because its import needs SciPy
    if package is None or package.origin is None:
        sys.exit("the photographs are those of scikit-image: pip install scikit-image")
    folder = Path(package.origin).parent / "data"
    photos = {}
    for name, file in sorted(PHOTOS.items()):
        with Image.open(folder / file) as image:
            photos[name] = image.convert("RGB")
    return photos


def random_view(
    photo: Image.Image, rng: np.random.Generator, *, size: tuple[int, int] | None = None, least: float = 0.4
) -> Image.Image:
    """Return a random part of `photo`, `least` to all of its shorter side, scaled to `size` or ImageNet's size."""
    width, height = size or (int(500 * rng.uniform(0.8, 1.2)), int(375 * rng.uniform(0.8, 1.2)))
    if size is None and rng.random() < 0.25:
        width, height = height, width
    scale = rng.uniform(least, 1.0) * min(photo.width / width, photo.height / height)
    left = rng.uniform(0, photo.width - width * scale)
    top = rng.uniform(0, photo.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    view = photo.resize((width, height), Image.Resampling.BICUBIC, box=box)
    if rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return ImageEnhance.Brightness(view).enhance(rng.uniform(0.8, 1.2))


def make_photos(dest: Path, *, num: int, seed: int) -> None:
    """Write `num` images below `dest`, the classes in turn; image n depends on (seed, n) only."""
    photos = load_photos()
    names = list(photos)
    for name in names:
        (dest / name).mkdir(parents=True, exist_ok=True)
    for number in range(num):
        name = names[number % len(names)]
        rng = np.random.default_rng([seed, number])
        view = random_view(photos[name], rng)
        view.save(dest / name / f"{number:06d}.jpg", quality=int(rng.integers(75, 96)))


def main() -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(description="Make an image folder of real photographs.")
    parser.add_argument("dest", type=Path, metavar="DEST")
    parser.add_argument("--num", type=int, default=1600, help="number of images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other images (default: %(default)s)")
    options = parser.parse_args()
    make_photos(options.dest, num=options.num, seed=options.seed)
    print(f"{options.num} photographs in {len(PHOTOS)} classes: {options.dest}")


if __name__ == "__main__":
    main()
