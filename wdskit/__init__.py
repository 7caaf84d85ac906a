"""Pack image and JSON samples into WebDataset shards and feed them to DDP training.

The import of this package loads only the standard library. The first use of a public name loads its module and the
packages that the module needs (numpy, torch, webdataset, ...).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    "loader.stats": ("LoaderStats", "StageStats"),
    "packing.pack": ("PackResult", "pack"),
    "packing.reshard": ("reshard",),
    "page": ("view",),
    "pipeline.builder": ("Pipeline",),
    "pipeline.settings": ("load_config",),
    "planning": ("EpochPlan", "StreamPlan", "plan"),
    "shards.index": ("IndexReport", "index_folder"),
    "shards.listing": ("SampleRow", "ShardRow", "Summary", "cat", "info"),
    "shards.split": ("SplitReport", "split"),
    "shards.verify": ("VerifyResult", "verify"),
    "shards.verify_shard": ("Finding",),
    "stages.base": ("thread_safe",),
    "stages.collate": ("Ragged",),
    "stages.registry": ("register",),
}
"""Maps each module to its public names."""

_HOMES = {name: f"wdskit.{module}" for module, names in _PUBLIC.items() for name in names}
__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 (type checkers read the block below)

if TYPE_CHECKING:  # tools/generate.py writes this from _PUBLIC
    from wdskit.benchmark import BenchResult as BenchResult
    from wdskit.benchmark import bench as bench
    from wdskit.dataset.columns import Columns as Columns
    from wdskit.dataset.columns import TextColumn as TextColumn
    from wdskit.dataset.columns import columns as columns
    from wdskit.dataset.shard import LocalShard as LocalShard
    from wdskit.errors import ConfigError as ConfigError
    from wdskit.errors import DecodeError as DecodeError
    from wdskit.errors import FolderIndexError as FolderIndexError
    from wdskit.errors import ImageTooLarge as ImageTooLarge
    from wdskit.errors import KeyRuleError as KeyRuleError
    from wdskit.errors import PackError as PackError
    from wdskit.errors import PipelineError as PipelineError
    from wdskit.errors import Problem as Problem
    from wdskit.errors import RankError as RankError
    from wdskit.errors import RowError as RowError
    from wdskit.errors import SampleError as SampleError
    from wdskit.errors import SelectionError as SelectionError
    from wdskit.errors import ShardError as ShardError
    from wdskit.errors import StateError as StateError
    from wdskit.errors import StorageError as StorageError
    from wdskit.errors import WdskitError as WdskitError
    from wdskit.loader.gather import gather_valid as gather_valid
    from wdskit.loader.make import make_loader as make_loader
    from wdskit.loader.stats import LoaderStats as LoaderStats
    from wdskit.loader.stats import StageStats as StageStats
    from wdskit.packing.pack import PackResult as PackResult
    from wdskit.packing.pack import pack as pack
    from wdskit.packing.reshard import reshard as reshard
    from wdskit.page import view as view
    from wdskit.pipeline.builder import Pipeline as Pipeline
    from wdskit.pipeline.settings import load_config as load_config
    from wdskit.planning import EpochPlan as EpochPlan
    from wdskit.planning import StreamPlan as StreamPlan
    from wdskit.planning import plan as plan
    from wdskit.shards.index import IndexReport as IndexReport
    from wdskit.shards.index import index_folder as index_folder
    from wdskit.shards.listing import SampleRow as SampleRow
    from wdskit.shards.listing import ShardRow as ShardRow
    from wdskit.shards.listing import Summary as Summary
    from wdskit.shards.listing import cat as cat
    from wdskit.shards.listing import info as info
    from wdskit.shards.split import SplitReport as SplitReport
    from wdskit.shards.split import split as split
    from wdskit.shards.verify import VerifyResult as VerifyResult
    from wdskit.shards.verify import verify as verify
    from wdskit.shards.verify_shard import Finding as Finding
    from wdskit.stages.base import thread_safe as thread_safe
    from wdskit.stages.collate import Ragged as Ragged
    from wdskit.stages.registry import register as register


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
