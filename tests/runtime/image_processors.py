"""The image processors of transformers, which need torchvision, also where it is not installed.

torchvision's wheels belong to one build of torch and do not load beside another. Of all that is in
them the processors call five functions on tensors; where it does not load, these stand in for them
while the processors are imported. What is compared with ours, rules and order of steps, is theirs.
"""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

_PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _pil_to_tensor(image: Image.Image) -> Tensor:
    values = np.array(image)
    return torch.from_numpy(values.reshape(*values.shape[:2], -1)).permute(2, 0, 1)


def _pad(image: Tensor, padding: Sequence[int], fill: float, padding_mode: str) -> Tensor:
    assert padding_mode == "constant"
    left, top, right, bottom = padding
    return F.pad(image, (left, right, top, bottom), value=fill)


def _normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool) -> Tensor:
    assert not inplace
    return (image - mean[:, None, None]) / std[:, None, None]


def _resize(image: Tensor, size: Sequence[int], interpolation: str, antialias: bool) -> Tensor:
    return F.interpolate(
        image[None], size=list(size), mode=interpolation, antialias=antialias, align_corners=False
    )[0]


def _stand_in() -> ModuleType:
    module = ModuleType("torchvision.transforms.v2.functional")
    module.pil_to_tensor = _pil_to_tensor
    module.pad = _pad
    module.normalize = _normalize
    module.resize = _resize
    module.grayscale_to_rgb = lambda image: image.expand(3, -1, -1) if len(image) == 1 else image
    module.InterpolationMode = SimpleNamespace(LANCZOS="lanczos", BICUBIC="bicubic")
    return module


def image_processors() -> dict[str, Any]:
    """Their classes, by name."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return _with_stand_in()
    return _processors()


def _processors() -> dict[str, Any]:
    found = {}
    for family in ("inkling", "inkling2"):
        name = f"transformers.models.{family}.image_processing_{family}"
        classes = vars(importlib.import_module(name))
        found |= {key: value for key, value in classes.items() if key.endswith("ImageProcessor")}
    return found


def _with_stand_in() -> dict[str, Any]:
    from transformers import image_processing_backends as backends

    functional = _stand_in()
    backends.tvF = functional
    backends.pil_torch_interpolation_mapping = {Image.Resampling.LANCZOS: "lanczos"}
    backends.is_torchvision_greater_or_equal = lambda _version: True
    packages = {name: ModuleType(name) for name in _PACKAGES}
    packages[_PACKAGES[-1]].functional = functional
    packages[functional.__name__] = functional
    try:
        sys.modules.update(packages)
        return _processors()
    finally:
        for name in packages:
            del sys.modules[name]
