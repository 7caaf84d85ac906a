"""Who takes part, what each installs, and in which settings."""

from __future__ import annotations

from dataclasses import dataclass

DECODERS = 4


@dataclass(frozen=True)
class Setting:
    """How a contestant is run.

    Args:
        label: Behind its name in the table.
        workers: Processes.
        threads: Threads in each.
        chain: See `Job.chain`; which of two loaders where a contestant has two.
    """

    label: str = ""
    workers: int = 0
    threads: int = 0
    chain: str = "pillow"


ALONE = (Setting(),)
WORKERS = (Setting(workers=DECODERS),)
THREADS = (Setting(threads=DECODERS),)


@dataclass(frozen=True)
class Contestant:
    """One of them.

    Args:
        name: Also its module in this folder.
        title: In the table.
        install: What pip installs into an environment of its own; nothing where the project's own will do.
        alone: Settings for one process that only reads; none if it cannot.
        images: For four decoders.
        writes: Whether it reads a format of its own, not the shards that the bare loop reads too.
        build: What must be on the machine to build it, for the line that says why it is not there.
    """

    name: str
    title: str
    install: tuple[str, ...] = ()
    alone: tuple[Setting, ...] = ALONE
    images: tuple[Setting, ...] = WORKERS
    writes: bool = True
    build: str = ""


CONTESTANTS = (
    Contestant(
        "bare",
        "bare loop",
        images=(Setting(f"{DECODERS} threads", threads=DECODERS), Setting("1 thread")),
    ),
    Contestant(
        "wdskit",
        "wdskit",
        writes=False,
        images=tuple(
            Setting(f"{workers} x {threads}", workers=workers, threads=threads)
            for workers, threads in ((0, 4), (1, 4), (2, 2), (4, 1))
        ),
    ),
    Contestant(
        "webdataset",
        "webdataset",
        writes=False,
        images=(Setting("Pillow", workers=DECODERS), Setting("simplejpeg, torch", workers=DECODERS, chain="fast")),
    ),
    Contestant("streaming", "MosaicML streaming", ("mosaicml-streaming==0.13.0",)),
    Contestant("litdata", "litdata", ("litdata==0.2.76",)),
    Contestant(
        "grain",
        "array_record",
        ("grain==0.2.18", "array-record==0.8.6"),
        alone=(Setting("grain"), Setting("DataLoader", chain="torch")),
        images=(Setting("grain", workers=DECODERS),),
    ),
    Contestant("energon", "Megatron energon", ("megatron-energon==7.4.1",)),
    Contestant("dali", "DALI on the CPU", ("nvidia-dali-cuda120==2.4.0",), images=THREADS),
    Contestant(
        "ffcv",
        "FFCV",
        ("ffcv==1.0.2",),
        images=THREADS,
        build="it is built here, and needs a C++ compiler, pkg-config and the headers of OpenCV and libturbojpeg",
    ),
    Contestant(
        "spdl",
        "SPDL",
        ("spdl==0.8.0", "spdl-io==0.8.0", "spdl-core==0.8.0"),
        images=THREADS,
        writes=False,
    ),
)
