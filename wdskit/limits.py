"""All limits that protect memory, time or other readers, each with its reason. `codecs.images` sets those of Pillow."""

from __future__ import annotations

BLOCK_BYTES = 512
"""Size of a block of a tar. A header takes one block; data is padded to whole blocks."""

MAX_NAME_BYTES = 100
"""Limit for a member's name: the size of the ustar name field, the only name field that all readers understand."""

MAX_USTAR_SIZE_BYTES = 8**11 - 1
"""Largest member size that 11 octal digits can store (8 GiB - 1). Readers disagree about larger sizes."""

MAX_EXTENSION_BYTES = 1 << 20
"""Limit for a pax or GNU extension header in the reader. Real headers have a few hundred bytes."""

MAX_READ_MEMBER_BYTES = 16 << 30
"""Limit for a member in the reader. Training holds a whole member in memory; a larger size is damage or an attack."""

MAX_READ_BYTES = 1 << 30
"""Limit for one read call: macOS refuses to read 2 GiB or more at once, and Linux reads less."""

MAX_CHECKED_BYTES = 32 << 20
"""Largest field whose content `verify` checks. For larger fields only the sha256 is checked: memory stays < 200 MB."""

MAX_HELD_BYTES = 1 << 20
"""Largest field that is read whole to list, copy or compare it. Larger fields are read in pieces."""

MAX_END_ZEROS_BYTES = 64 << 20
"""Limit for the zeros after the end marker. tar pads its last record, to 10 KiB by default, rarely to over 1 MiB."""

MAX_SHARD_BYTES = 10**12
"""Sizes of shards in options must be smaller. A size of 1 TB or more is a typing error in the unit."""

MAX_SHARD_NAMES = 2_000_000
"""Limit for the names from a shard pattern: twice the largest number of shards that was measured."""

MAX_INDEX_BYTES = 1 << 30
"""Largest `index.json` that is read: about five million shards."""

MAX_IDX_BYTES = 1 << 30
"""Largest `.idx` that is read: 134 million samples in one shard, whose headers alone take 69 GB."""

MAX_EPOCH = 10**9
"""Largest number of an epoch: its positions fit in 64 bits for data of up to 9 billion samples."""

MAX_PIXELS = 100_000_000
"""Default limit for width x height of one image: 300 MB as RGB. Training images are hardly ever larger."""

MAX_SHOWN_PIXELS = 50_000_000
"""Limit for width x height of an image that is decoded for display."""

MAX_CONFIG_BYTES = 1 << 19
"""Largest configuration file. PyYAML needs 10 s for the values that fit in it. 5,000 shards take half of it."""

MAX_UNPACKED_BYTES = 32 << 20
"""Data of a zip member or parquet page that unpacks to more than this is checked against `MAX_UNPACK_RATIO`."""

MAX_UNPACK_RATIO = 200
"""Limit for unpacked / packed size. Text reaches 20, photographs 1; deflate can reach 1032 (a decompression bomb)."""

MAX_COCO_BYTES = 2 << 30
"""Limit for a file of COCO annotations, which is held in memory: four times the file of its 118,000 training images."""

MAX_ROW_BYTES = 4 << 20
"""Limit for a line of a manifest, and for the JSON of one sample. In Python a line takes up to 25 times its size."""

MAX_LISTED = 20
"""Limit for the listed findings of one kind in one shard, and for all listed keys. The last finding counts the rest."""
