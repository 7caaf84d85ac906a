"""Record batches of an Arrow stream that lies in memory, none of which is unpacked or reaches outside of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wdskit.errors import PackError

if TYPE_CHECKING:
    import pyarrow as pa

# Numbers of fields in Arrow's format/Message.fbs.
_MESSAGE_HEADER = 2
_BATCH_COMPRESSION = 3


def record_batches(data: pa.Buffer, path: str) -> Iterator[pa.RecordBatch]:
    """The record batches, checked: offsets stay inside of their buffers, text is UTF-8.

    Raises:
        PackError: One is compressed or a dictionary, or is damaged.
    """
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(data)
    schema = pa.ipc.read_schema(reader.read_next_message())
    for message in reader:
        if message.type != "record batch":
            raise PackError(f"{path}: it holds a {message.type}. Save it with plain columns.")
        if _is_compressed(bytes(memoryview(message.metadata))):
            raise PackError(f"{path}: it is compressed. Save it again: save_to_disk of datasets does not compress.")
        batch = pa.ipc.read_record_batch(message, schema)
        try:
            batch.validate(full=True)
        except pa.ArrowException as err:
            raise PackError(f"{path}: it is damaged: {str(err).splitlines()[0]}.") from err
        yield batch


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch's message says how its body is compressed. It is a flatbuffer: a table begins with the
    distance back to its vtable, which has the size of itself, that of the table, and the place of each field in that.
    """
    try:
        message = struct.unpack_from("<I", metadata)[0]
        at = message + _field(metadata, message, _MESSAGE_HEADER)
        batch = at + struct.unpack_from("<I", metadata, at)[0]
        return _field(metadata, batch, _BATCH_COMPRESSION) != 0
    except struct.error:
        return True  # it is damaged: refused in any case


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field stands in its table, 0 where it has none."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    place = 4 + 2 * number
    return int(struct.unpack_from("<H", data, vtable + place)[0]) if place < size else 0
