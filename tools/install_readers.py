"""Install the programs of `make peers`, each in an environment of its own that sees this one's torch.

    python tools/install_readers.py FOLDER

torchvision, which timm and open_clip ask for, is left out: nothing that reads shards needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from peers.catalogue import Contestant
from peers.install import python_of

READERS = (
    ("energon", "megatron-energon==7.4.1"),
    ("dali", "nvidia-dali-cuda120==2.4.0"),
    ("timm", "timm==1.0.31"),
    ("open_clip", "open_clip_torch==3.3.0"),
    ("wids", "wids==0.1.11"),
    ("ray", "ray==2.60.0"),
)


def main() -> None:
    """Install those that are not there yet."""
    if len(sys.argv) != 2:
        raise SystemExit("name the folder for the environments, as .venv/peers")
    for name, requirement in READERS:
        python = python_of(Contestant(name, name, (requirement,)), Path(sys.argv[1]).resolve(), install=True)
        print(f"{requirement}: {python}")


if __name__ == "__main__":
    main()
