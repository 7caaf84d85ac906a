"""Every limit that protects memory, time or other readers, in one place, with its reason."""

from __future__ import annotations

BLOCK_BYTES = 512
"""A tar is made of these; header = one block, data padded to a multiple."""

MAX_NAME_BYTES = 100
"""Longest member name in bytes: the ustar name field, the only one that all readers understand."""

MAX_USTAR_SIZE_BYTES = 8**11 - 1
"""Largest member that 11 octal digits can state (8 GiB - 1); beyond it readers disagree."""

MAX_EXTENSION_BYTES = 1 << 20
"""Largest pax or GNU extension header that the reader accepts; real ones hold a few hundred bytes."""

MAX_READ_MEMBER_BYTES = 16 << 30
"""Largest member the reader accepts. Training holds one in memory whole, so a larger claim is damage or an attack."""

MAX_READ_BYTES = 1 << 30
"""Most bytes that one call reads: macOS refuses to read 2 GiB or more at once, and Linux reads less."""

MAX_CHECKED_BYTES = 32 << 20
"""Largest field whose content `verify` looks at; a larger one is digested only, so that memory stays under 200 MB."""

MAX_HELD_BYTES = 1 << 20
"""Largest field that is held in memory by what only lists, copies or compares it; a larger one goes by in pieces."""

MAX_END_ZEROS_BYTES = 64 << 20
"""Most zeros after the end marker: tar fills up its last record, 10 KiB by default and rarely more than 1 MiB."""

MAX_HTTP_HEADER_BYTES = 1 << 18
"""Most bytes of headers of one http response, redirects and trailers alike; real ones hold a few thousand bytes."""

MAX_SHARD_BYTES = 10**12
"""No shard is asked to be as large: it is a unit too many."""

MAX_SHARD_NAMES = 2_000_000
"""Most names a shard pattern may expand to: twice as many shards as were ever measured."""

MAX_INDEX_BYTES = 1 << 30
"""Largest `index.json` that is read: some five million shards."""

MAX_IDX_BYTES = 1 << 30
"""Largest `.idx` that is read: 134 million samples in one shard, whose headers alone take 69 GB."""

MAX_PIXELS = 100_000_000
MAX_SHOWN_PIXELS = 50_000_000  # of an image that is decoded to be looked at
"""Default for width x height of one image: 300 MB as RGB. Larger photos exist; larger training photos hardly do."""

MAX_CONFIG_BYTES = 1 << 20
"""Largest configuration file."""

MAX_CONFIG_DEPTH = 32
"""Deepest nesting in a configuration file."""

MAX_UNPACKED_BYTES = 32 << 20
"""A member of a zip that claims to be larger must take more than a 200th of that in the zip."""

MAX_UNPACK_RATIO = 200
"""Photographs do not shrink at all, and text by 20 at most; deflate ends at 1032."""

MAX_COCO_BYTES = 2 << 30
"""Largest file of COCO annotations: four times that of its 118,000 training images. It is held in memory."""

MAX_ROW_BYTES = 4 << 20
"""Longest line of a manifest, and longest JSON of one sample; read by Python it takes up to 25 times as much."""

MAX_LISTED = 20
"""Findings of one kind that are listed for one shard, and keys that are listed in all; the last says how many more."""
