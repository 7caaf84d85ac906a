"""Functions that readers copy from docs/detection.md compute what the page says."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
from folders import REPOSITORY


def functions_of(heading: str) -> dict[str, Callable[..., Any]]:
    """Return the functions in the first Python block below a heading; the rest of the block does not run."""
    page = (REPOSITORY / "docs" / "detection.md").read_text(encoding="utf-8")
    block = page.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]
    tree = ast.parse(block)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found: dict[str, Any] = {"np": np}
    exec(compile(tree, "detection.md", "exec"), found)
    return found


def test_boxes_stay_on_what_they_mark() -> None:
    """The pixels of each box keep its label's value through crop and flip; boxes without area are removed."""
    crop_and_flip = functions_of("Without torchvision")["crop_and_flip"]
    rng = np.random.default_rng(0)
    num_boxes = []
    for _ in range(300):
        image = np.zeros((60, 80, 3), np.uint8)
        boxes = [[10, 5, 30, 25], [40, 30, 70, 55]][: int(rng.integers(0, 3))]
        labels = [100, 200][: len(boxes)]
        annotations = [
            {"bbox": [left, top, right - left, bottom - top], "category_id": label}
            for (left, top, right, bottom), label in zip(boxes, labels, strict=True)
        ]
        for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
            image[top:bottom, left:right] = label
        out = crop_and_flip({"jpg": image, "json": {"annotations": annotations}}, rng, size=40)
        assert out["jpg"].shape == (40, 40, 3)
        assert (out["boxes"].dtype, out["boxes"].shape) == (np.float32, (len(out["labels"]), 4))
        num_boxes.append(len(out["labels"]))
        for label in labels:
            rows, columns = np.nonzero(out["jpg"][..., 0] == label)
            kept = out["boxes"][out["labels"] == label].tolist()
            whole = 20 * 20 if label == 100 else 30 * 25
            assert len(kept) == (len(rows) >= 0.2 * whole)
            if kept:
                assert kept == [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]
    assert set(num_boxes) == {0, 1, 2}
