"""Pack image and JSON samples into WebDataset shards and feed them to DDP training.

Importing this package loads the standard library only. Each name below loads its module, and what that needs (numpy,
torch, webdataset, ...), when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from wdskit.errors import (
    ConfigError,
    DecodeError,
    FolderIndexError,
    ImageTooLarge,
    KeyRuleError,
    PackError,
    PipelineError,
    Problem,
    RankError,
    RowError,
    SampleError,
    SelectionError,
    ShardError,
    StateError,
    StorageError,
    WdskitError,
)

if TYPE_CHECKING:
    from wdskit.dataset.shard import LocalShard
    from wdskit.loader.distributed import gather_valid
    from wdskit.loader.make import make_loader
    from wdskit.loader.stats import LoaderStats, StageStats
    from wdskit.packing.api import PackResult, finish_pack, pack
    from wdskit.packing.options import PackOptions, ReshardOptions
    from wdskit.packing.reshard import ReshardResult, reshard
    from wdskit.packing.samples.select import SelectResult, select
    from wdskit.pipeline.builder import Pipeline
    from wdskit.pipeline.settings import load_config
    from wdskit.shards.diff import DiffResult, diff
    from wdskit.shards.export import ExportReport, export
    from wdskit.shards.index import IndexReport, index_folder
    from wdskit.shards.inspect import MemberRow, SampleRow, ShardRow, Summary, cat, info, ls
    from wdskit.shards.split import SplitReport, split
    from wdskit.shards.stats import ShardStats, stats
    from wdskit.shards.verify import VerifyResult, verify
    from wdskit.shards.verify_shard import Finding
    from wdskit.stages.base import thread_safe
    from wdskit.stages.collate import Ragged
    from wdskit.stages.registry import register
    from wdskit.tune.bench import BenchResult, bench
    from wdskit.tune.plan import EpochPlan, StreamPlan, plan
    from wdskit.view.report import write_report

__version__ = "0.1.0"

__all__ = [
    "BenchResult",
    "ConfigError",
    "DecodeError",
    "DiffResult",
    "EpochPlan",
    "ExportReport",
    "Finding",
    "FolderIndexError",
    "ImageTooLarge",
    "IndexReport",
    "KeyRuleError",
    "LoaderStats",
    "LocalShard",
    "MemberRow",
    "PackError",
    "PackOptions",
    "PackResult",
    "Pipeline",
    "PipelineError",
    "Problem",
    "Ragged",
    "RankError",
    "ReshardOptions",
    "ReshardResult",
    "RowError",
    "SampleError",
    "SampleRow",
    "SelectResult",
    "SelectionError",
    "ShardError",
    "ShardRow",
    "ShardStats",
    "SplitReport",
    "StageStats",
    "StateError",
    "StorageError",
    "StreamPlan",
    "Summary",
    "VerifyResult",
    "WdskitError",
    "__version__",
    "bench",
    "cat",
    "diff",
    "export",
    "finish_pack",
    "gather_valid",
    "index_folder",
    "info",
    "load_config",
    "ls",
    "make_loader",
    "pack",
    "plan",
    "register",
    "reshard",
    "select",
    "split",
    "stats",
    "thread_safe",
    "verify",
    "write_report",
]

_HOMES = {
    "DiffResult": "wdskit.shards.diff",
    "diff": "wdskit.shards.diff",
    "Summary": "wdskit.shards.inspect",
    "info": "wdskit.shards.inspect",
    "cat": "wdskit.shards.inspect",
    "ExportReport": "wdskit.shards.export",
    "export": "wdskit.shards.export",
    "IndexReport": "wdskit.shards.index",
    "index_folder": "wdskit.shards.index",
    "MemberRow": "wdskit.shards.inspect",
    "SampleRow": "wdskit.shards.inspect",
    "ShardRow": "wdskit.shards.inspect",
    "ls": "wdskit.shards.inspect",
    "Finding": "wdskit.shards.verify_shard",
    "LoaderStats": "wdskit.loader.stats",
    "StageStats": "wdskit.loader.stats",
    "LocalShard": "wdskit.dataset.shard",
    "Pipeline": "wdskit.pipeline.builder",
    "BenchResult": "wdskit.tune.bench",
    "bench": "wdskit.tune.bench",
    "gather_valid": "wdskit.loader.distributed",
    "Ragged": "wdskit.stages.collate",
    "ReshardResult": "wdskit.packing.reshard",
    "VerifyResult": "wdskit.shards.verify",
    "load_config": "wdskit.pipeline.settings",
    "make_loader": "wdskit.loader.make",
    "pack": "wdskit.packing.api",
    "PackResult": "wdskit.packing.api",
    "finish_pack": "wdskit.packing.api",
    "PackOptions": "wdskit.packing.options",
    "ReshardOptions": "wdskit.packing.options",
    "reshard": "wdskit.packing.reshard",
    "SelectResult": "wdskit.packing.samples.select",
    "select": "wdskit.packing.samples.select",
    "EpochPlan": "wdskit.tune.plan",
    "StreamPlan": "wdskit.tune.plan",
    "plan": "wdskit.tune.plan",
    "register": "wdskit.stages.registry",
    "ShardStats": "wdskit.shards.stats",
    "SplitReport": "wdskit.shards.split",
    "split": "wdskit.shards.split",
    "stats": "wdskit.shards.stats",
    "thread_safe": "wdskit.stages.base",
    "verify": "wdskit.shards.verify",
    "write_report": "wdskit.view.report",
}


def __getattr__(name: str) -> object:
    """Load the module where `name` lives and keep what it holds (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return list(__all__)
