"""Field codecs: what each name promises, and an error that names the field for everything else."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from wdskit.codecs.fields import decode_field, encode_field
from wdskit.codecs.npy_header import read_npy_header
from wdskit.errors import DecodeError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(),
    npst.unicode_string_dtypes(max_len=4),
)
ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def npy(array, **options):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


def npy_of(header, payload=b"", version=b"\x01\x00"):
    text = header.encode("latin1")
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + payload


# --- text and integers


ROUND_TRIPS = [
    *((name, st.text(st.characters(exclude_categories=["Cs"]))) for name in ("txt", "text", "transcript", "c.TXT")),
    *((name, st.integers(-(10**4000), 10**4000)) for name in ("cls", "cls2", "index", "inx", "id", "coarse.cls")),
    *((name, JSON) for name in ("json", "jsn", "meta.JSON")),
]


@pytest.mark.parametrize(("field", "values"), ROUND_TRIPS)
@given(data=st.data())
def test_values_round_trip(field, values, data):
    value = data.draw(values)
    assert decode_field(field, encode_field(field, value)) == value


@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"\xed\xa0\x80"], ids=["byte", "cut", "surrogate"])
def test_text_is_strict_utf8(data):
    with pytest.raises(DecodeError, match=r"^txt: 'utf-8' codec") as caught:
        decode_field("txt", data)
    assert caught.value.field == "txt"
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


@pytest.mark.parametrize("data", [b"", b" ", b"1.0", b"1_0", b"0x1", b"1 2", b"one", b"\xd9\xa1", b"1" * 5000])
def test_what_is_no_integer_is_an_error(data):
    with pytest.raises(DecodeError, match=r"^cls: ") as caught:
        decode_field("cls", data)
    assert caught.value.field == "cls"


# --- JSON


@given(JSON, st.sampled_from([None, 1, 2]), st.booleans())
def test_json_values_are_the_standard_librarys(value, indent, ascii_only):
    """Types are equal too: orjson makes floats of integers beyond 64 bits, json does not."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assume(text.encode("utf-8", "ignore").decode() == text)
    assert repr(decode_field("json", text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize("place", range(20))
@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**18, 10**19, 10**40])
def test_big_integers_stay_integers_wherever_they_stand(place, number):
    data = b" " * place + b'{"a":[%d]}' % number
    assert repr(decode_field("json", data)) == repr({"a": [number]})
    assert repr(decode_field("json", memoryview(data))) == repr({"a": [number]})


def test_json_reads_what_orjson_refuses():
    assert repr(decode_field("json", b"[NaN, Infinity, -Infinity]")) == "[nan, inf, -inf]"
    assert decode_field("json", b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert decode_field("json", b'"\\ud800"') == "\ud800"
    deep = b"[" * 500 + b"]" * 500
    assert decode_field("json", deep) == json.loads(deep)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1}}',
        b"\xff",
        b'"\xed\xa0\x80"',
        "[1]".encode("utf-16"),
        b"[" * 10**6,
        b"1" * 5000,
    ],
    ids=["empty", "cut", "quotes", "trailing", "byte", "surrogate", "utf-16", "deep", "long integer"],
)
def test_damaged_json_is_an_error(data):
    with pytest.raises(DecodeError, match=r"^json: ") as caught:
        decode_field("json", data)
    assert caught.value.field == "json"
    assert len(str(caught.value)) < 1000


@given(st.binary(max_size=60))
def test_noise_is_json_only_where_the_standard_library_agrees(noise):
    try:
        value = decode_field("json", noise)
    except DecodeError:
        return
    assert repr(value) == repr(json.loads(str(noise, "utf-8-sig")))


@pytest.mark.parametrize(
    "value",
    [float("nan"), [float("inf")], {"a": {1, 2}}, "\ud800", {"a": b"bytes"}, {(1, 2): 3}, object(), {1, 2}],
    ids=["nan", "inf", "set inside", "surrogate", "bytes inside", "tuple key", "object", "set"],
)
def test_values_that_json_lacks_are_an_error(value):
    with pytest.raises(DecodeError, match=r"^json: "):
        encode_field("json", value)


# --- npy


@given(ARRAYS)
def test_npy_round_trips(array):
    data = encode_field("npy", array)
    assert data == encode_field("npy", array.copy())
    result = decode_field("npy", data)
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert result.tobytes() == array.tobytes()
    assert result.flags.writeable
    assert result.flags.c_contiguous
    assert result.flags.owndata


@given(npst.arrays(npst.nested_dtypes() | npst.array_dtypes() | npst.datetime64_dtypes(), (2,)), st.booleans())
def test_npy_headers_of_all_versions_are_read_as_numpy_reads_them(array, fortran_order):
    assume(array.dtype.itemsize)
    array = np.asfortranarray(np.stack([array] * 3)) if fortran_order else array
    assume(str(array.dtype.descr).encode("latin1", "ignore").decode("latin1") == str(array.dtype.descr))
    for version in ((1, 0), (2, 0)):
        data = npy(array, version=version)
        shape, is_fortran, dtype, start = read_npy_header(data)
        expected = np.lib.format.read_array(io.BytesIO(data))
        assert (shape, dtype, data[start:]) == (
            expected.shape,
            expected.dtype,
            array.tobytes("F" if is_fortran else "C"),
        )
        assert decode_field("npy", data).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("header", "shape"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (3L,)}", (3,)),  # Python 2
        ('{"shape": (3, ), "fortran_order": False, "descr": "<f8"}\n', (3,)),
        ("  {'descr':'<f8','fortran_order':True,'shape':( 1,3 ),}   ", (1, 3)),
        ("{'descr': 'float64', 'fortran_order': False, 'shape': (3, 1, 1,), }", (3, 1, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")
def test_npy_headers_of_other_writers_are_read(header, shape):
    result = decode_field("npy", npy_of(header, np.arange(3.0).tobytes()))
    assert result.shape == shape
    assert result.ravel().tolist() == [0, 1, 2]


@pytest.mark.parametrize("error", [SystemError, MemoryError, RecursionError, KeyboardInterrupt])
def test_what_befalls_the_process_is_no_damage_of_a_field(monkeypatch, error):
    def fail(*_, **__):
        raise error

    fields = {"npy": npy(np.arange(3)), "json": b"[NaN]"}
    monkeypatch.setattr(np, "frombuffer", fail)
    monkeypatch.setattr(json, "loads", fail)
    for field, data in fields.items():
        with pytest.raises(error):
            decode_field(field, data)


def test_result_of_npy_does_not_share_the_fields_memory():
    data = bytearray(encode_field("npy", np.arange(10)))
    result = decode_field("npy", data)
    data[-8:] = bytes(8)
    assert result[-1] == 9


def test_no_prefix_and_no_extension_of_an_npy_passes():
    data = encode_field("npy", np.arange(6, dtype=np.int16).reshape(2, 3))
    for cut in range(len(data)):
        with pytest.raises(DecodeError):
            decode_field("npy", data[:cut])
    with pytest.raises(DecodeError, match=r"^npy: \(2, 3\) of int16 takes 12 bytes, but 13 follow the header"):
        decode_field("npy", data + b"\0")


@pytest.mark.parametrize(
    "shape", ["(1000000000000,)", "(99999999999999999999,)", "(-1,)", "(-3, -2)", "(7, 0, 1)", "(1.0,)"]
)
def test_a_shape_that_lies_is_found_before_any_allocation(shape):
    data = npy_of(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n", bytes(48))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=r"^npy: "):
            decode_field("npy", data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': [('a', '<i4'), ('b', '|O')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '|V0', 'fortran_order': False, 'shape': (5,)}",
        "{'descr': '<f8', 'fortran_order': 1, 'shape': (1,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1)}",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,)}",
        "__import__('os').getpid()",
        "(" * 3000,
        "-" * 9000 + "1",
        "\0\0",
    ],
)
def test_damaged_and_object_headers_are_errors(header):
    for version in (b"\x01\x00", b"\x02\x00"):
        with pytest.raises(DecodeError, match=r"^npy: "):
            decode_field("npy", npy_of(header, bytes(8), version))


@given(ARRAYS, st.data())
def test_a_damaged_npy_is_an_error_or_an_array_of_the_size_at_hand(array, data):
    damaged = bytearray(encode_field("npy", array))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = decode_field("npy", bytes(damaged))
    except DecodeError:
        return
    assert not result.dtype.hasobject
    assert result.nbytes <= len(damaged)


def test_arrays_of_objects_and_with_a_mask_are_not_written():
    masked = np.ma.masked_equal([1, -9999], -9999)  # numpy would write the hidden values
    for array in (np.array([{}, None]), np.zeros(2, dtype=[("a", "O")]), np.zeros(3, dtype="V0"), masked):
        with pytest.raises(DecodeError, match=r"^npy: "):
            encode_field("npy", array)


# --- other fields


@pytest.mark.parametrize("field", ["txt", "cls", "json", "npy", "jpg", "pkl"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_pass_through_every_field(field, kind):
    encoded = encode_field(field, kind(b"as it is"))
    assert type(encoded) is bytes
    assert encoded == b"as it is"


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("txt", 1, "int"),
        ("cls", "1", "str"),
        ("cls", True, "bool"),
        ("npy", [1, 2], "list"),
        ("json", np.arange(3), "ndarray"),
        ("jpg", "text", "str"),
    ],
)
def test_wrong_types_are_named_with_the_field(field, value, name):
    with pytest.raises(DecodeError, match=rf"^{field}: .*{name}") as caught:
        encode_field(field, value)
    assert caught.value.field == field
