"""Which stages run as one: `decode` of images and the crop behind it, with flip and normalize. Specs in, specs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from wdskit.codecs.images import IMAGE_SPECS
from wdskit.config.spec import Kind, StageSpec

_FIRST = {"random_resized_crop": (), "resize": ("center_crop",)}
"""What may stand behind `decode`, and what belongs to it if it comes next."""

_ENDINGS = (("random_flip",), ("normalize", "to_tensor"), ("normalize", "to_tensor"))
"""What may follow, each at most once, and flips before numbers."""


class FusedSpec(StageSpec):
    """Stages that run as one step. It is made by `fuse`, has no name in YAML and is no item of `STAGES`."""

    name: ClassVar[str] = "decode"
    kind: ClassVar[Kind] = "each"

    stages: tuple[StageSpec, ...]


def fuse(specs: Sequence[Any]) -> list[Any]:
    """The pipeline with a FusedSpec in place of each run of stages that can be one.

    A run is `decode` with colour images (`rgb8`, `rgb`, `torchrgb8`, ...) and directly behind it `random_resized_crop`,
    or `resize` with or without `center_crop`; then, as far as they follow, `random_flip`, and `normalize` and
    `to_tensor` in any order. All of them act on the same single field. Masks, several fields, `fuse: false` and
    whatever else stands between, a user's function above all, end a run or leave it apart.
    """
    fused: list[Any] = []
    at = 0
    while at < len(specs):
        length = _length_of_run(specs[at:])
        fused.append(FusedSpec(stages=tuple(specs[at : at + length])) if length > 1 else specs[at])
        at += max(1, length)
    return fused


def _length_of_run(specs: Sequence[Any]) -> int:
    """How many stages from the first on can be one; 0 or 1 for none."""
    decode = specs[0]
    if getattr(decode, "name", None) != "decode" or not decode.fuse or decode.images not in IMAGE_SPECS:
        return 0
    image = IMAGE_SPECS[decode.images]
    if image.kind == "pil" or image.mode != "RGB" or len(specs) < 2:
        return 0
    field = getattr(specs[1], "fields", None)

    def fits(at: int, names: Sequence[str]) -> bool:
        spec = specs[at] if at < len(specs) else None
        return (
            isinstance(spec, StageSpec)
            and spec.name in names
            and getattr(spec, "fields", None) == field
            and not getattr(spec, "masks", None)
        )

    if len(field or ()) > 1 or not fits(1, list(_FIRST)):
        return 0
    length = 3 if fits(2, _FIRST[specs[1].name]) else 2
    seen: set[str] = set()
    for names in _ENDINGS:
        if fits(length, names) and specs[length].name not in seen:
            seen.add(specs[length].name)
            length += 1
    return length
