"""Pack image and JSON samples into WebDataset shards and feed them to DDP training.

The import of this package loads only the standard library. The first use of a public name loads its module and the
packages that the module needs (numpy, torch, webdataset, ...). `tools/dev/generate.py` writes `__init__.pyi`.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PUBLIC: dict[str, tuple[str, ...]] = {
    "benchmark": ("BenchResult", "bench"),
    "dataset.columns": ("Columns", "TextColumn", "columns"),
    "dataset.shard": ("LocalShard",),
    "errors": (
        "ConfigError",
        "DecodeError",
        "FolderIndexError",
        "ImageTooLarge",
        "KeyRuleError",
        "PackError",
        "PipelineError",
        "Problem",
        "RankError",
        "RowError",
        "SampleError",
        "SelectionError",
        "ShardError",
        "StateError",
        "StorageError",
        "WdskitError",
    ),
    "loader.gather": ("gather_valid",),
    "loader.make": ("make_loader",),
    "loader.stats": ("LoaderStats",),
    "packing.pack": ("PackResult", "pack", "reshard"),
    "page": ("view",),
    "pipeline.builder": ("Pipeline",),
    "pipeline.settings": ("load_config",),
    "planning": ("EpochPlan", "plan"),
    "shards.index": ("IndexReport", "index_folder"),
    "shards.info": ("SampleRow", "ShardRow", "Summary", "cat", "info"),
    "shards.split": ("SplitReport", "split"),
    "shards.verify": ("VerifyResult", "verify"),
    "shards.verify_shard": ("Finding",),
    "stages.collate": ("Ragged",),
    "stages.registry": ("register",),
    "stages.run": ("thread_safe",),
}
"""Maps each module to its public names."""

_HOMES = {name: f"wdskit.{module}" for module, names in _PUBLIC.items() for name in names}
__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 (type checkers read __init__.pyi)


def __getattr__(name: str) -> object:
    """Import the public object `name` at its first use (PEP 562).

    Raises:
        AttributeError: `name` is not public.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, including names whose modules are not loaded yet."""
    return list(__all__)
