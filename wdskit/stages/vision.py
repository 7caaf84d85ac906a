"""The stage `torchvision`: transforms of torchvision.transforms.v2 for images with masks, boxes, keypoints and labels.

torchvision is an extra, `wdskit[torchvision]`. It is imported when a pipeline with this stage is checked or built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema

from wdskit.config.types import refuse, show, wrong_kind
from wdskit.errors import PipelineError, WdskitError
from wdskit.stages.base import Context, Origin, PerSampleStage, Run
from wdskit.stages.fields import check_dict, pick
from wdskit.stages.roles import Live, Roles
from wdskit.text import install_extra

AFTER_BATCHED = ("MixUp", "CutMix")
_NEEDS_LIST = "a list of transforms is needed, as in [{RandomResizedCrop: {size: 224}}, RandomHorizontalFlip]"

FieldKind = Annotated[
    Annotated[Literal["image", "mask", "labels", "keypoints"], Tag("[list]")]
    | Annotated[dict[Literal["boxes"], Literal["xywh", "xyxy", "cxcywh"]], Field(min_length=1), Tag("[settings]")],
    Discriminator(lambda value: "[settings]" if isinstance(value, Mapping) else "[list]"),
]
FieldKinds = Annotated[dict[str, FieldKind], Field(min_length=1)]


def _check_transforms(value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise refuse(wrong_kind(value, _NEEDS_LIST))
    for item in value:
        _name_and_settings(item)
    try:
        import torchvision.transforms.v2  # noqa: F401
    except (ImportError, RuntimeError):
        return tuple(value)  # `bind` raises the error
    for item in value:
        make_transform(item)
    return tuple(value)


def _name_and_settings(item: object) -> tuple[str, dict[str, Any]] | None:
    """Return (name, settings) of a transform in YAML; None if `item` is a transform already, which is any callable.
    PydanticCustomError: `item` is not a name, {Name: {setting: value}} or a callable.
    """
    if isinstance(item, str):
        return item, {}
    if isinstance(item, Mapping):
        [pair] = item.items() if len(item) == 1 else [(None, None)]
        name, settings = pair
        if not isinstance(name, str) or not isinstance(settings or {}, Mapping):
            raise refuse(f"{show(item)} is not {{Name: {{setting: value}}}}.")
        return name, dict(settings or {})
    if not callable(item):
        raise refuse(f"{show(item)} is neither the name of a transform nor a transform.")
    return None


def make_transform(item: Any) -> Any:
    """Return the transform that `item` describes: a name, or {Name: {setting: value}}. Return a transform unchanged.

    Raises:
        PydanticCustomError: torchvision has no transform with this name, or its settings are invalid.
    """
    from torchvision.transforms import v2

    parts = _name_and_settings(item)
    if parts is None:
        return item
    name, settings = parts
    kind: Any = getattr(v2, name, None) if not name.startswith("_") else None
    is_transform = isinstance(kind, type) and issubclass(kind, v2.Transform) and kind is not v2.Transform
    if name == "Lambda" or not is_transform:
        what = "runs code" if name == "Lambda" else "is not a transform of torchvision.transforms.v2"
        raise refuse(f"`{name}` {what}. Call your own functions with `map`.")
    settings = {setting: _value_of(setting, value) for setting, value in settings.items()}
    if name == "SanitizeBoundingBoxes":
        settings.setdefault("labels_getter", labels_of)
    try:
        return kind(**settings)
    except (TypeError, ValueError) as err:
        raise refuse(f"{name}: {str(err).rstrip('.')}.") from None


def _value_of(setting: str, value: Any) -> Any:
    """Convert the value of a setting in YAML for torchvision. For `transforms` and `transform`, names of transforms
    become objects. For `dtype` and `interpolation`, a name becomes an object. Return other values unchanged.
    PydanticCustomError: A name is unknown, or the settings of a named transform are invalid.
    """
    import torch
    from torchvision.transforms import v2

    if setting in ("transforms", "transform"):
        return [make_transform(each) for each in value] if isinstance(value, (list, tuple)) else make_transform(value)
    if setting == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value, None)
        if not isinstance(dtype, torch.dtype):
            raise refuse(f"dtype: {show(value)} is not a dtype of torch, such as float32.")
        return dtype
    if setting == "interpolation" and isinstance(value, str):
        known = [mode.value for mode in v2.InterpolationMode]
        if value not in known:
            raise refuse(f"interpolation: {show(value)} is not one of {', '.join(known)}.")
        return v2.InterpolationMode(value)
    return value


def _takes_first_labels(transform: Any) -> bool:
    """Return whether a transform is, or contains at any depth, a `SanitizeBoundingBoxes` with torchvision's default
    `labels_getter`, which takes only one value of labels from a sample.
    """
    inner = getattr(transform, "transforms", ())  # a container of torchvision may hold a list
    children = [*(inner if isinstance(inner, Iterable) else ())]
    children += transform.children() if hasattr(transform, "children") else ()
    return getattr(transform, "labels_getter", None) == "default" or any(map(_takes_first_labels, children))


def labels_of(sample: Mapping[str, Any]) -> Any:
    """Return the values of all keys that start with "labels", as a tuple. Return None if `sample` has no such key or
    is not a dict.

    This is the default `labels_getter` of `SanitizeBoundingBoxes`.
    """
    labels = (
        tuple(value for name, value in sample.items() if name.startswith("labels")) if isinstance(sample, dict) else ()
    )
    return labels or None


Transforms = Annotated[
    tuple[Any, ...], PlainValidator(_check_transforms), WithJsonSchema({"type": "array", "items": {}, "minItems": 1})
]


class Torchvision(PerSampleStage):
    """Apply transforms of torchvision.transforms.v2 to an image with its masks, boxes, keypoints and labels.

    torch's random numbers depend on the seed, the stage and the sample's position. torch's global generator is not
    changed. Images and masks become tensors ([channels, ]height, width). An image of Pillow that is not a mask
    stays an image of Pillow. After `batched`, only `MixUp` and `CutMix` are possible.
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
        "name. Default: the only image field; after `batched`, the first two values of a tuple: images and labels.",
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
        return roles.with_images(images, "colours").with_images(self.mask_names, "mask").with_lists(lists)

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using(self.fields or (), images=not self.fields)

    def bind(self, context: Context, label: str) -> BoundTorchvision:
        """Return the function that maps a sample or a batch to a transformed copy. `label` is the key of the random
        numbers (see `PerSampleStage.bind`).

        Raises:
            PipelineError: torchvision is not installed, or its build does not fit torch. Or `SanitizeBoundingBoxes` is
                given as an object that would filter only one of several fields of labels.
        """
        try:
            from torchvision.transforms import v2
        except ImportError as err:
            raise PipelineError(f"torchvision: it is not installed.\n  {install_extra('torchvision')}") from err
        except RuntimeError as err:  # as "operator torchvision::nms does not exist"
            import torch

            msg = f"torchvision: it cannot be imported: {err}."
            raise PipelineError(f"{msg}\n  Install the build that belongs to torch {torch.__version__}.") from err
        transforms = [make_transform(item) for item in self.transforms]
        names = [type(transform).__name__ for transform in transforms]
        labels = [name for name, kind in (self.fields or {}).items() if kind == "labels"]
        if len(labels) > 1 and any(map(_takes_first_labels, transforms)):
            msg = f"torchvision: this SanitizeBoundingBoxes would filter only one of the labels {', '.join(labels)}"
            way = "Give its name, {'SanitizeBoundingBoxes': {...}}, or its `labels_getter`"
            raise PipelineError(f"{msg}.\n  {way}.")
        return BoundTorchvision(
            v2.Compose(transforms), dict(self.fields or {}), context.roles, context.run, label, tuple(names)
        )


@dataclass(frozen=True)
class BoundTorchvision:
    """Applies the transforms of the stage `torchvision` to samples or batches.

    Attributes:
        transform: All transforms of the stage, composed to one.
        fields: Maps each field to change to its kind, a value of the setting `fields`. Empty: in a sample, the only
            image field is changed; in a batch, the first two values of a tuple.
        roles: What the stages before say of the fields.
        run: The running pipeline, which has the random numbers.
        label: Key of the stage's random numbers.
        names: The class names of the transforms.
    """

    transform: Any
    fields: dict[str, Any]
    roles: Roles
    run: Run
    label: str
    names: tuple[str, ...]

    def __call__(self, sample: Any, origin: Origin) -> Any:
        """Return a copy of the sample, or of the batch, with the fields changed. Errors of a transform pass unchanged.

        Raises:
            WdskitError: A field is missing, or is not of the kind that `fields` gives.
            PipelineError: The sample is not a dict, or a field is not decoded. Or `fields` is empty, and the sample has
                no image field or several. Or `MixUp` or `CutMix` cannot find images and labels in the batch, or a batch
                meets another transform.
        """
        import torch

        if origin.members:
            return self._mix(sample, origin)
        check_dict("torchvision", sample)
        kinds = self.fields or {self._only_image(sample): "image"}
        inputs, keys = self._inputs_of(sample, kinds)
        # All threads share the generators of the process, so seeding and drawing happen under a lock.
        with self.run.call_lock(self.transform, global_rng=True), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(self.run.rng_of(self.label)(origin).integers(1 << 63)))
            changed = self.transform(inputs)
        return {**sample, **{name: _as_value(changed[key], kinds[name]) for name, key in keys.items()}}

    def _only_image(self, sample: Mapping[str, Any]) -> str:
        images = [name for name in sample if self.roles.is_image(name)]
        if len(images) != 1:
            found = f"several images ({', '.join(images)})" if images else "no image"
            raise PipelineError(f"torchvision: {found} in this sample. Name the fields, as in `fields: {{jpg: image}}`")
        return images[0]

    def _inputs_of(self, sample: Mapping[str, Any], kinds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return (inputs, keys). `inputs` is the dict that the transforms take, with images and masks first. `keys`
        maps each field to its key in `inputs`: "labels NAME" for a field NAME of the kind "labels", otherwise the
        field.

        `kinds` maps each field to its kind. The errors are those of `fields.pick` and `_as_input`.
        """
        inputs: dict[str, Any] = {}
        keys: dict[str, str] = {}
        size: tuple[int, int] | None = None
        for name, kind in sorted(kinds.items(), key=lambda item: item[1] not in ("image", "mask")):
            key = f"labels {name}" if kind == "labels" else name
            inputs[key], image_size = _as_input(name, pick("torchvision", sample, name), kind, size)
            size = size or image_size
            keys[name] = key
        return inputs, keys

    def _mix(self, batch: Any, origin: Origin) -> Any:
        """Apply `MixUp` or `CutMix` to a batch, and return the new batch. `origin` decides the random numbers.

        The first two values of a tuple are the images and the labels. In a dict, the setting `fields` names them.

        Raises:
            PipelineError: A transform is neither `MixUp` nor `CutMix`. Or the batch is neither a dict nor a tuple of
                two or more values. Or the batch is a dict, and `fields` does not name one key of images and one of
                labels in it.
        """
        import torch

        other = next((name for name in self.names if name not in AFTER_BATCHED), None)
        if other is not None:
            raise PipelineError(
                f"torchvision: `{other}` takes samples; put it before `batched`. After it are MixUp, CutMix"
            )
        if isinstance(batch, dict):
            images = [name for name, kind in self.fields.items() if kind == "image"]
            labels = [name for name, kind in self.fields.items() if kind == "labels"]
            if len(images) != 1 or len(labels) != 1 or not {*images, *labels} <= batch.keys():
                raise PipelineError("torchvision: name the images and the labels: `fields: {jpg: image, cls: labels}`")
            pair = batch[images[0]], batch[labels[0]]
        elif isinstance(batch, tuple) and len(batch) >= 2:
            images, labels, pair = [], [], batch[:2]
        else:
            raise PipelineError(
                "torchvision: after `batched` it takes images and labels, as a dict or the first of a tuple"
            )
        with self.run.call_lock(self.transform, global_rng=True), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(self.run.rng_of(self.label)(origin).integers(1 << 63)))
            mixed = self.transform(*pair)
        if isinstance(batch, dict):
            return {**batch, images[0]: mixed[0], labels[0]: mixed[1]}
        return (*mixed, *batch[2:])


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
            tensor = torch.from_numpy(np.ascontiguousarray(value))
            value = tensor.permute(2, 0, 1).contiguous() if tensor.ndim == 3 else tensor
        if not isinstance(value, torch.Tensor) or value.ndim not in (2, 3):
            raise WdskitError(f"torchvision: `{name}` is not an image but {type(value).__name__}")
        made = tv_tensors.Image(value) if kind == "image" else tv_tensors.Mask(value)
        return made, (int(value.shape[-2]), int(value.shape[-1]))
    try:
        array = np.asarray(value)
    except ValueError as err:
        raise WdskitError(f"torchvision: `{name}` has rows of different lengths") from err
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
    form = tv_tensors.BoundingBoxFormat[kind["boxes"].upper()]
    return tv_tensors.BoundingBoxes(numbers, format=form, canvas_size=size), None


def _as_value(value: Any, kind: Any) -> Any:
    """Return the result of torchvision for one field, as a value for the sample. `kind` is the kind of the field. An
    image of Pillow, and a tensor of the kind "image" or "mask", stay what they are. Another tensor becomes an array.
    """
    import torch

    if hasattr(value, "getbands"):
        return value
    plain = value.as_subclass(torch.Tensor)
    return plain if kind in ("image", "mask") else plain.numpy()
