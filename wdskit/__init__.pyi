# `tools/dev/generate.py` writes this file from `_PUBLIC`.

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
from wdskit.packing.pack import PackResult as PackResult
from wdskit.packing.pack import pack as pack
from wdskit.packing.pack import reshard as reshard
from wdskit.page import view as view
from wdskit.pipeline.builder import Pipeline as Pipeline
from wdskit.pipeline.settings import load_config as load_config
from wdskit.planning import EpochPlan as EpochPlan
from wdskit.planning import plan as plan
from wdskit.shards.index import IndexReport as IndexReport
from wdskit.shards.index import index_folder as index_folder
from wdskit.shards.info import SampleRow as SampleRow
from wdskit.shards.info import ShardRow as ShardRow
from wdskit.shards.info import Summary as Summary
from wdskit.shards.info import cat as cat
from wdskit.shards.info import info as info
from wdskit.shards.split import SplitReport as SplitReport
from wdskit.shards.split import split as split
from wdskit.shards.verify import VerifyResult as VerifyResult
from wdskit.shards.verify import verify as verify
from wdskit.shards.verify_shard import Finding as Finding
from wdskit.stages.collate import Ragged as Ragged
from wdskit.stages.registry import register as register
from wdskit.stages.run import thread_safe as thread_safe

__all__ = [
    "BenchResult",
    "Columns",
    "ConfigError",
    "DecodeError",
    "EpochPlan",
    "Finding",
    "FolderIndexError",
    "ImageTooLarge",
    "IndexReport",
    "KeyRuleError",
    "LoaderStats",
    "LocalShard",
    "PackError",
    "PackResult",
    "Pipeline",
    "PipelineError",
    "Problem",
    "Ragged",
    "RankError",
    "RowError",
    "SampleError",
    "SampleRow",
    "SelectionError",
    "ShardError",
    "ShardRow",
    "SplitReport",
    "StateError",
    "StorageError",
    "Summary",
    "TextColumn",
    "VerifyResult",
    "WdskitError",
    "__version__",
    "bench",
    "cat",
    "columns",
    "gather_valid",
    "index_folder",
    "info",
    "load_config",
    "make_loader",
    "pack",
    "plan",
    "register",
    "reshard",
    "split",
    "thread_safe",
    "verify",
    "view",
]

__version__: str
_PUBLIC: dict[str, tuple[str, ...]]
_HOMES: dict[str, str]
