"""Make `import torchvision` work with a torch whose build lacks torchvision's operators; enough for transforms.v2.

`make setup` unpacks torchvision into `.venv/torchvision`, where no other test finds it.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "torchvision"


def make_importable() -> None:
    """Import the package; declare its operators first if torch does not have them."""
    try:
        import torchvision.transforms.v2  # noqa: F401
    except (ImportError, RuntimeError):  # not installed, or built for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return
    import torch

    sys.path.append(str(FOLDER))
    source = (FOLDER / "torchvision" / "_meta_registrations.py").read_text()
    names = {*re.findall(r'register_meta\("(\w+)"', source), *re.findall(r"torchvision::(\w+)", source)}
    make_importable.library = library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
    for name in sorted(names):
        library.define(f"{name}() -> Tensor")
    importlib.import_module("torchvision.transforms.v2")
    sys.path.remove(str(FOLDER))  # other tests, and the processes that they start, do not find it
