"""The stage `torchvision`: transforms of torchvision.transforms.v2 for images with masks, boxes, keypoints and labels.

torchvision is an extra, `wdskit[torchvision]`. It is imported when a pipeline with this stage is checked or built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, Discriminator, Field, Tag

from wdskit.config.types import Alternatives, refuse, show
from wdskit.errors import PipelineError, WdskitError
from wdskit.stages.base import Context, PerSampleStage
from wdskit.stages.fields import check_dict, find, pick
from wdskit.stages.images.geometry import shared_tensor
from wdskit.stages.images.transforms import only_image
from wdskit.stages.run import Live, Origin, Roles, Run
from wdskit.text import install_extra

FieldKind = Annotated[
    Annotated[Literal["image", "mask", "labels", "keypoints"], Tag("[list]")]
    | Annotated[dict[Literal["boxes"], Literal["xywh", "xyxy", "cxcywh"]], Field(min_length=1), Tag("[settings]")],
    Discriminator(lambda value: "[settings]" if isinstance(value, Mapping) else "[list]"),
]
FieldKinds = Annotated[dict[Alternatives, FieldKind], Field(min_length=1)]


def _check_transforms(transforms: tuple[Any, ...]) -> tuple[Any, ...]:
    with contextlib.suppress(ImportError, RuntimeError):  # `bind` raises that torchvision cannot be imported
        for item in transforms:
            make_transform(item)
    return transforms


def make_transform(item: Any) -> Any:
    """Return the transform that `item` describes: a name, or {Name: {setting: value}}. Return a callable unchanged.

    Raises:
        PydanticCustomError: torchvision has no transform with this name, or its settings are invalid.
        ImportError, RuntimeError: torchvision cannot be imported.
    """
    from torchvision.transforms import v2

    if callable(item):
        return item
    [(name, settings)] = item.items() if isinstance(item, Mapping) and len(item) == 1 else [(item, {})]
    kind = getattr(v2, name, None) if isinstance(name, str) and not name.startswith("_") else None
    if not isinstance(kind, type) or not issubclass(kind, v2.Transform):
        msg = f"{show(name)} is not a transform of torchvision.transforms.v2, as in {{Resize: {{size: 224}}}}"
        raise refuse(f"{msg}. Call your own functions with `map`.")
    try:
        return kind(**{setting: _value_of(setting, value) for setting, value in dict(settings or {}).items()})
    except (TypeError, ValueError) as err:
        raise refuse(f"{name}: {str(err).rstrip('.')}.") from None


def _value_of(setting: str, value: Any) -> Any:
    """Convert the value of a setting in YAML for torchvision. For `transforms` and `transform`, names of transforms
    become objects. For `dtype` and `interpolation`, a name becomes an object. Return other values unchanged.
    ValueError: A name is unknown, or the settings of a named transform are invalid.
    """
    import torch
    from torchvision.transforms import v2

    if setting in ("transforms", "transform"):
        return [make_transform(each) for each in value] if isinstance(value, (list, tuple)) else make_transform(value)
    if setting == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value, None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return v2.InterpolationMode(value) if setting == "interpolation" and isinstance(value, str) else value


Transforms = Annotated[tuple[Any, ...], Field(min_length=1), AfterValidator(_check_transforms)]


class Torchvision(PerSampleStage):
    """Apply transforms of torchvision.transforms.v2 to an image with its masks, boxes, keypoints and labels.

    torch's random numbers depend on the seed, the stage and the sample's position. torch's global generator is not
    changed. Images and masks become tensors ([channels, ]height, width). An image of Pillow that is not a mask
    stays an image of Pillow. `MixUp` and `CutMix` take batches: call them in a `map` after `batched`.
    """

    name: ClassVar[str] = "torchvision"
    calls_user: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "transforms"

    transforms: Transforms = Field(
        description="Each item: the name of a class of torchvision.transforms.v2, or {Name: {setting: value}}; in "
        "Python also a transform object.",
        examples=[[{"RandomResizedCrop": {"size": 224}}, "RandomHorizontalFlip"]],
    )
    fields: FieldKinds | None = Field(
        None,
        description="Maps each field to its kind: image, mask, labels, keypoints, or boxes as {boxes: xywh}, "
        "{boxes: xyxy} or {boxes: cxcywh}. The result for a path in JSON is stored as a field with the path as its "
        "name. Default: the only image field, as a mask after `decode: index`.",
    )

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The fields to which the setting `fields` gives the kind `mask`."""
        return tuple(name for name, kind in (self.fields or {}).items() if kind == "mask")

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        kinds = self.fields or {}
        images = [name for name, kind in kinds.items() if kind == "image"]
        lists = [name for name, kind in kinds.items() if kind not in ("image", "mask")]
        return roles.named(images, self.mask_names, lists)

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using(self.fields or (), images=not self.fields)

    def bind(self, context: Context, label: str) -> BoundTorchvision:
        """Return the function that maps a sample to a transformed copy. `label` is the key of the random numbers (see
        `PerSampleStage.bind`). PipelineError: torchvision is not installed, or its build does not fit torch.
        """
        try:
            from torchvision.transforms import v2
        except (ImportError, RuntimeError) as err:  # RuntimeError: another build than torch's
            msg = f"torchvision: it cannot be imported: {err}.\n  It must be a build for your torch: docs/recipes.md."
            raise PipelineError(f"{msg} {install_extra('torchvision')}") from err
        transform = v2.Compose([make_transform(item) for item in self.transforms])
        return BoundTorchvision(transform, dict(self.fields or {}), context.roles, context.run, label)


@dataclass(frozen=True)
class BoundTorchvision:
    """Applies the transforms of the stage `torchvision` to samples.

    Attributes:
        transform: All transforms of the stage, composed to one.
        fields: The setting `fields`: maps each field to change, or its alternatives, to its kind. Empty: the only image
            field is changed.
        roles: What the stages before say of the fields.
        run: The running pipeline, which has the random numbers.
        label: Key of the stage's random numbers.
    """

    transform: Any
    fields: dict[str, Any]
    roles: Roles
    run: Run
    label: str

    def __call__(self, sample: Any, origin: Origin) -> Any:
        """Return a copy of the sample with the fields changed. Errors of a transform pass unchanged.

        Raises:
            WdskitError: A field is missing, or is not of the kind that `fields` gives.
            PipelineError: The sample is not a dict, or a field is not decoded. Or `fields` is empty, and the sample has
                no image field or several.
        """
        import torch

        check_dict("torchvision", sample)
        only = "" if self.fields else only_image("torchvision", sample, self.roles)
        kinds = self.fields or {only: "mask" if self.roles.is_mask(only) else "image"}
        kinds = {find("torchvision", sample, names)[0]: kind for names, kind in kinds.items()}
        inputs = self._inputs_of(sample, kinds)
        # All threads share the generators of the process, so seeding and drawing happen under a lock.
        with self.run.call_lock(self.transform, global_rng=True), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(self.run.rng_at(self.label, origin).integers(1 << 63)))
            changed = self.transform(inputs)
        labels = [name for name, kind in kinds.items() if kind == "labels"]
        values = changed["fields"] | dict(zip(labels, changed["labels"], strict=True))
        return {**sample, **{name: _as_value(value, kinds[name]) for name, value in values.items()}}

    def _inputs_of(self, sample: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dict that the transforms take: under "fields" the values of the other fields by name, images and
        masks first; under "labels" a tuple of all labels, where `SanitizeBoundingBoxes` finds them.

        `kinds` maps each field to its kind. The errors are those of `fields.pick` and `_as_input`.
        """
        inputs: dict[str, Any] = {}
        size: tuple[int, int] | None = None
        for name, kind in sorted(kinds.items(), key=lambda item: item[1] not in ("image", "mask")):
            inputs[name], image_size = _as_input(name, pick("torchvision", sample, name), kind, size)
            size = size or image_size
        labels = tuple(inputs.pop(name) for name, kind in kinds.items() if kind == "labels")
        return {"fields": inputs, "labels": labels}


def _as_input(name: str, value: Any, kind: Any, size: tuple[int, int] | None) -> tuple[Any, tuple[int, int] | None]:
    """Convert the value of one field to the form that torchvision takes.

    Args:
        name: Name of the field, for messages.
        value: The decoded value.
        kind: The kind of the field, a value of the setting `fields`.
        size: Height and width of the sample's image or mask, for boxes and keypoints; None if neither has been
            converted yet.

    Returns:
        (converted value, size). `size` is (height, width) of an image or a mask, and None for another kind.

    Raises:
        PipelineError: The value is not decoded.
        WdskitError: The value is not of this kind. Or the kind is boxes or keypoints, and `size` is None.
    """
    import torch
    from torchvision import tv_tensors

    if isinstance(value, bytes | bytearray | memoryview):
        raise PipelineError(f"torchvision: `{name}` is not decoded yet. Put `decode: rgb8` before it")
    if kind in ("image", "mask"):
        if hasattr(value, "getbands"):  # an image of Pillow
            return (value if kind == "image" else tv_tensors.Mask(value)), (value.height, value.width)
        if isinstance(value, np.ndarray):
            tensor = shared_tensor(value)
            value = tensor.permute(2, 0, 1).contiguous() if tensor.ndim == 3 else tensor
        if not isinstance(value, torch.Tensor) or value.ndim not in (2, 3):
            raise WdskitError(f"torchvision: `{name}` is not an image but {type(value).__name__}")
        made = tv_tensors.Image(value) if kind == "image" else tv_tensors.Mask(value)
        return made, (int(value.shape[-2]), int(value.shape[-1]))
    try:
        array = np.asarray(value)
    except ValueError as err:
        raise WdskitError(f"torchvision: `{name}`: {err}") from err
    if kind == "labels":
        if array.dtype.kind not in "iub" and array.size:
            raise WdskitError(f"torchvision: `{name}`: labels are whole numbers, not {array.dtype}")
        return torch.from_numpy(array.astype(np.int64)), None
    if size is None:
        raise WdskitError(f"torchvision: `{name}` needs the size of an image; name one in `fields`")
    width = 2 if kind == "keypoints" else 4
    if array.size == 0:
        array = np.zeros((0, width))
    if array.ndim != 2 or array.shape[1] != width or array.dtype.kind not in "iuf":
        raise WdskitError(f"torchvision: `{name}` has the shape {array.shape}, not (number, {width})")
    numbers = torch.from_numpy(array.astype(np.float32))
    if kind == "keypoints":
        return tv_tensors.KeyPoints(numbers, canvas_size=size), None
    return tv_tensors.BoundingBoxes(numbers, format=kind["boxes"], canvas_size=size), None


def _as_value(value: Any, kind: Any) -> Any:
    """Return the result of torchvision for one field, as a value for the sample. `kind` is the kind of the field. An
    image of Pillow, and a tensor of the kind "image" or "mask", stay what they are. Another tensor becomes an array.
    """
    import torch

    if hasattr(value, "getbands"):
        return value
    plain = value.as_subclass(torch.Tensor)
    return plain if kind in ("image", "mask") else plain.numpy()
