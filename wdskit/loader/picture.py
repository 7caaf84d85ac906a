"""Pictures of matplotlib, an extra: whether one can be drawn, and how it comes to disk."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from wdskit.errors import PipelineError, StorageError
from wdskit.files import publish_bytes, why_not

KINDS = (".png", ".svg")
COLOURS = ("#0072B2", "#E69F00", "#009E73")  # told apart by colour-blind eyes too (Okabe and Ito)
GREY = "#888888"


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that could not be drawn, before anything is computed.

    Raises:
        PipelineError: Another kind of file, or matplotlib is not installed.
        StorageError: There is no such folder, or nothing may be written there.
    """
    if Path(path).suffix.lower() not in KINDS:
        raise PipelineError(f"{path}: a picture is drawn as .png or .svg.")
    problem = why_not(Path(path))
    if problem:
        raise StorageError(f"{path}: the picture cannot be written: {problem}.", url=str(path))
    try:
        import matplotlib  # noqa: F401, ICN001 (only whether it is there)
    except ImportError as err:
        raise PipelineError("a picture needs matplotlib.\n  Install it: pip install 'wdskit[plot]'.") from err


def save_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure, `.png` or `.svg`; what is there is replaced as a whole.

    Raises:
        StorageError: The file cannot be written.
    """
    kind = Path(path).suffix.lower()[1:]
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        publish_bytes(Path(path), stream.getvalue())
    except OSError as err:
        raise StorageError(f"{path}: the picture cannot be written: {err.strerror}.", url=str(path)) from err
