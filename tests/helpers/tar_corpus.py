"""Small tar archives, good and bad, each with the expected result of a strict reader.

Most headers are built here from POSIX's table, not with wdskit's writer, so that the two can disagree. Archives of
other programs are in `golden/tar`. `write_with_gnu_tar` made most of them with GNU tar 1.34; the tests make them again
with the installed GNU tar. Four were made by hand: the second volumes of `tar -M -L 25 --format=gnu` and `=posix`,
`git archive` of a commit without a file, and the first three of `FILES` by Perl's Archive::Tar.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from folders import GOLDEN

USTAR = b"ustar\x0000"
GNU = b"ustar  \x00"
V7 = bytes(8)
END = bytes(1024)

A = ("a.txt", b"first")
B = ("b.txt", b"second")


class Anything:
    """Equal to every checksum."""

    def __eq__(self, other):
        return True

    __hash__ = None


@dataclass(frozen=True)
class Case:
    """An archive, the members that are read from it, and text and offset of the error after them (None: no error)."""

    name: str
    data: bytes
    members: tuple[tuple[str, bytes], ...]
    error: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        return self.name


def checksum_of(block: bytes, *, signed: bool = False) -> int:
    """Return the sum of a header's bytes, the checksum counted as spaces; `signed` bytes are those of old Suns."""
    return sum(byte - 256 if signed and byte > 127 else byte for byte in block[:148] + b" " * 8 + block[156:])


def header(
    name: bytes,
    size: int | bytes = 0,
    *,
    kind: bytes = b"0",
    magic: bytes = USTAR,
    link: bytes = b"",
    prefix: bytes = b"",
    mtime: bytes = b"00000000000\x00",
    checksum: bytes = b"%06o\x00 ",
    change: int = 0,
    signed: bool = False,
) -> bytes:
    """Return one header block. `size` is a number or the 12 raw bytes; `change` is added to the right checksum."""
    size_field = b"%011o\x00" % size if isinstance(size, int) else size
    block = name.ljust(100, b"\x00") + b"0000644\x00" + b"0001750\x00" * 2 + size_field + mtime + b" " * 8
    block += kind + link.ljust(100, b"\x00") + magic + b"user".ljust(32, b"\x00") * 2
    block += b"0000000\x00" * 2 + prefix.ljust(155, b"\x00")
    block = block.ljust(512, b"\x00")
    assert len(block) == 512
    field = checksum % (checksum_of(block, signed=signed) + change) if b"%" in checksum else checksum
    return block[:148] + field.ljust(8, b"\x00")[:8] + block[156:]


def padded(data: bytes) -> bytes:
    """Return data, padded to whole blocks."""
    return data + bytes(-len(data) % 512)


def member(name: bytes | str, data: bytes, **fields) -> bytes:
    """Return the header and the padded data of a member."""
    name = name.encode() if isinstance(name, str) else name
    return header(name, fields.pop("size", len(data)), **fields) + padded(data)


def record(keyword: bytes, value: bytes) -> bytes:
    """Return one pax record. Its length includes the digits of the length."""
    length = len(keyword) + len(value) + 3
    while len(str(length)) + len(keyword) + len(value) + 3 != length:
        length = len(str(length)) + len(keyword) + len(value) + 3
    return b"%d %s=%s\n" % (length, keyword, value)


def pax(body: bytes, *, kind: bytes = b"x", **fields) -> bytes:
    """Return a pax header with raw records."""
    return member(b"./PaxHeaders/x", body, kind=kind, **fields)


def pax_path(name: bytes) -> bytes:
    """Return a pax header that gives a path."""
    return pax(record(b"path", name))


def long_name(name: bytes, *, kind: bytes = b"L", end: bytes = b"\x00") -> bytes:
    """Return the member of a GNU long name."""
    return member(b"././@LongLink", name + end, kind=kind, magic=GNU)


FIRST, SECOND = member(*A), member(*B)
AT = len(FIRST)  # offset of the member after FIRST

GLOBAL = pax(record(b"comment", b"abc"), kind=b"g")
LARGE = bytes(range(256)) * 1300

_DEEP = b"d" * 120 + b"/" + b"n" * 90 + b".txt"
_LONG = b"folder/" * 40 + b"long.txt"
_FULL = b"n" * 507 + b".txt"


def _several(contents: list[bytes]) -> tuple[bytes | tuple[str, bytes], ...]:
    """Return an archive of members with these contents, followed by the members."""
    members = [(f"m{number:03d}.bin", data) for number, data in enumerate(contents)]
    return b"".join(member(*each) for each in members) + END, *members


ODD_KINDS = {
    "hard-link": (b"1", "a hard link"),
    "symbolic-link": (b"2", "a symbolic link"),
    "character-device": (b"3", "a character device"),
    "block-device": (b"4", "a block device"),
    "fifo": (b"6", "a FIFO"),
    "sparse-old-gnu": (b"S", "a sparse file"),
    "gnu-directory-listing": (b"D", "a GNU directory listing"),
    "multi-volume": (b"M", "multi-volume"),
    "volume-label": (b"V", "a volume label"),
}


def _good() -> list[Case]:
    """Return archives that are read without an error."""

    def good(name: str, data: bytes, *members: tuple[str, bytes]) -> Case:
        return Case(name, data, members)

    full = b"n" * 96 + b".txt"
    return [
        good("ustar", FIRST + SECOND + END, A, B),
        good("empty-member", member("a.txt", b"") + SECOND + END, ("a.txt", b""), B),
        good("511-bytes", member("a.txt", b"x" * 511) + SECOND + END, ("a.txt", b"x" * 511), B),
        good("512-bytes", member("a.txt", b"x" * 512) + SECOND + END, ("a.txt", b"x" * 512), B),
        good("513-bytes", member("a.txt", b"x" * 513) + SECOND + END, ("a.txt", b"x" * 513), B),
        good("data-of-zero-blocks", member("a.txt", bytes(4096)) + SECOND + END, ("a.txt", bytes(4096)), B),
        good("data-like-a-tar", member("a.tar", FIRST + END) + SECOND + END, ("a.tar", FIRST + END), B),
        good("name-of-100-bytes", member(full, b"x") + END, (full.decode(), b"x")),
        good("ustar-prefix", member("n.txt", b"x", prefix=b"deep/er") + END, ("deep/er/n.txt", b"x")),
        good(
            "ustar-prefix-of-155-bytes",
            member(full, b"x", prefix=b"p" * 155) + END,
            ("p" * 155 + "/" + full.decode(), b"x"),
        ),
        good("v7", member("a.txt", b"first", magic=V7) + END, A),
        good("v7-type-nul", member("a.txt", b"first", magic=V7, kind=b"\x00") + END, A),
        good("v7-ignores-a-prefix", member("a.txt", b"first", magic=V7, prefix=b"no") + END, A),
        good("gnu-magic", member("a.txt", b"first", magic=GNU) + SECOND + END, A, B),
        good("gnu-ignores-a-prefix", member("a.txt", b"first", magic=GNU, prefix=b"no") + END, A),
        good("contiguous-file", member("a.txt", b"first", kind=b"7") + END, A),
        good("mtime-base-256", member("a.txt", b"first", mtime=b"\x80" + bytes(7) + b"\x01\x02\x03\x04") + END, A),
        good("size-with-space-behind", member("a.txt", b"first", size=b"0000000005 \x00") + END, A),
        good("size-with-spaces-before", member("a.txt", b"first", size=b"          5\x00") + END, A),
        good("size-of-12-digits", member("a.txt", b"first", size=b"000000000005") + END, A),
        good("size-base-256", member("a.txt", b"first", size=b"\x80" + bytes(10) + b"\x05") + SECOND + END, A, B),
        good("checksum-with-7-digits", member("a.txt", b"first", checksum=b"%07o\x00") + END, A),
        good("checksum-with-spaces-before", member("a.txt", b"first", checksum=b"%6o\x00 ") + END, A),
        good("checksum-with-space-then-nul", member("a.txt", b"first", checksum=b"%06o \x00") + END, A),
        good("pax-path", pax_path(_LONG) + member("cut", b"x") + SECOND + END, (_LONG.decode(), b"x"), B),
        good("pax-path-overrules-prefix", pax_path(b"a.txt") + member("n", b"first", prefix=b"p") + END, A),
        good("pax-path-not-ascii", pax_path("ä/ö.txt".encode()) + member("x", b"x") + END, ("ä/ö.txt", b"x")),
        good("pax-size", pax(record(b"size", b"5")) + member("a.txt", b"first", size=0) + SECOND + END, A, B),
        good(
            "pax-times-and-owners",
            pax(record(b"mtime", b"1.5") + record(b"uname", b"x") + record(b"SCHILY.xattr.user.a", b"\x00=\n"))
            + FIRST
            + END,
            A,
        ),
        good(
            "pax-record-twice", pax(record(b"path", b"no") + record(b"path", b"a.txt")) + member("x", b"first") + END, A
        ),
        good(
            "pax-path-and-size",
            pax_path(b"a.txt") + pax(record(b"size", b"5")) + member("x", b"first", size=0) + END,
            A,
        ),
        good("pax-header-empty", pax(b"") + FIRST + END, A),
        good("pax-value-with-newline", pax(record(b"path", b"a\nb.txt")) + member("x", b"x") + END, ("a\nb.txt", b"x")),
        good("pax-keyword-not-ascii", pax(record(b"GNU.volume.size\xff", b"5")) + FIRST + END, A),
        good("pax-value-not-utf-8", pax(record(b"uname", b"\xff\xfe")) + FIRST + END, A),
        good("pax-value-empty", pax(record(b"comment", b"")) + FIRST + END, A),
        good("pax-length-with-zeros-before", pax(b"0016 path=a.txt\n") + member("x", b"first") + END, A),
        good("pax-volume-label", pax(record(b"GNU.volume.label", b"x"), kind=b"g") + FIRST + END, A),
        good("pax-header-of-1-mb", pax(record(b"comment", b"c" * ((1 << 20) - 17))) + FIRST + END, A),
        good("pax-size-the-same", pax(record(b"size", b"5")) + FIRST + SECOND + END, A, B),
        good("pax-global-comment", pax(record(b"comment", b"abc"), kind=b"g") + FIRST + SECOND + END, A, B),
        good("pax-global-twice", GLOBAL * 2 + FIRST + GLOBAL + SECOND + END, A, B),
        good("pax-global-between-pax-and-member", pax_path(b"a.txt") + GLOBAL + member("x", b"first") + END, A),
        good("pax-global-before-pax", GLOBAL + pax_path(b"a.txt") + member("x", b"first") + END, A),
        good("pax-global-before-the-end", FIRST + GLOBAL + END, A),
        good("pax-global-alone", GLOBAL + END),
        good(
            "gnu-long-name", long_name(_LONG) + member("cut", b"x", magic=GNU) + SECOND + END, (_LONG.decode(), b"x"), B
        ),
        good("gnu-long-name-of-512-bytes", long_name(_FULL) + member("cut", b"x") + END, (_FULL.decode(), b"x")),
        good("gnu-long-name-cut-at-99", long_name(_LONG) + member(_LONG[:99], b"x") + END, (_LONG.decode(), b"x")),
        good("gnu-long-name-cut-at-100", long_name(_LONG) + member(_LONG[:100], b"x") + END, (_LONG.decode(), b"x")),
        good("pax-path-confirmed", pax_path(b"f/README") + member("f/README", b"x") + END, ("f/README", b"x")),
        good("pax-path-replaced", pax_path("ä/README".encode()) + member("?/README", b"x") + END, ("ä/README", b"x")),
        good("directory", member("d/", b"", kind=b"5") + FIRST + END, A),
        good("directory-without-slash", member("d", b"", kind=b"5") + FIRST + END, A),
        good("directory-by-its-slash", member("d/", b"", magic=V7, kind=b"\x00") + FIRST + END, A),
        good("directory-with-pax-path", pax_path(b"d" * 200 + b"/") + member("d/", b"", kind=b"5") + FIRST + END, A),
        good("directory-with-gnu-name", long_name(b"d" * 200 + b"/") + member("d/", b"", kind=b"5") + FIRST + END, A),
        good("directory-of-base-256-size", member("d/", b"", kind=b"5", size=b"\x80" + bytes(11)) + FIRST + END, A),
        good("directories-only", member("d/", b"", kind=b"5") + member("d/e/", b"", kind=b"5") + END),
        good("directory-by-the-slash-of-a-pax-path", pax_path(b"d/") + member("d/", b"") + FIRST + END, A),
        good("name-not-ascii", member("ä.txt", b"x") + END, ("ä.txt", b"x")),
        good("name-of-one-byte", member("a", b"x") + END, ("a", b"x")),
        good("name-absolute", member("/etc/a.txt", b"x") + END, ("/etc/a.txt", b"x")),
        good("name-that-leads-out", member("../../a.txt", b"x") + END, ("../../a.txt", b"x")),
        good("name-with-dots-in-folders", member("v1.0/a.b/c.d.txt", b"x") + END, ("v1.0/a.b/c.d.txt", b"x")),
        good("name-of-a-dot-file", member("f/.hidden.txt", b"x") + FIRST + END, ("f/.hidden.txt", b"x"), A),
        good("name-with-a-dot-at-its-end", member("a.", b"x") + FIRST + END, ("a.", b"x"), A),
        good("name-in-capitals", member("A.JPG", b"x") + END, ("A.JPG", b"x")),
        good("name-with-spaces", member(" a b .txt ", b"x") + END, (" a b .txt ", b"x")),
        good("name-with-control-characters", member("a\n\t\x1b.txt", b"x") + END, ("a\n\t\x1b.txt", b"x")),
        good("name-with-a-backslash", member("a\\b.txt", b"x") + END, ("a\\b.txt", b"x")),
        good("name-with-bytes-behind-its-nul", member(b"a.txt\x00.exe", b"first") + END, A),
        good("prefix-with-bytes-behind-its-nul", member("a.txt", b"x", prefix=b"p\x00q") + END, ("p/a.txt", b"x")),
        good("name-not-utf-8-overruled", pax_path(b"a.txt") + member(b"\xff", b"first") + END, A),
        good("name-with-dot-slash", member("./a.txt", b"x") + END, ("./a.txt", b"x")),
        *(
            good(
                f"{name}-without-a-key", FIRST + member(b"latest", b"", kind=kind) + SECOND + END, A, ("latest", b""), B
            )
            for name, (kind, _) in ODD_KINDS.items()
        ),
        good(
            "sparse-old-gnu-without-a-key-extended",
            FIRST
            + header(b"hole", 3, kind=b"S", change=1)[:482]
            + b"\x01"
            + bytes(29)
            + bytes(504)
            + b"\x01"
            + bytes(7)
            + bytes(512)
            + padded(b"end")
            + SECOND
            + END,
            A,
            ("hole", b""),
            B,
        ),
        good(
            "sparse-pax-without-a-key",
            FIRST + pax(record(b"GNU.sparse.major", b"1")) + member("l", b"x") + END,
            A,
            ("l", b""),
        ),
        good(
            "volume-label-without-size-without-a-key",
            member("l", b"", kind=b"V", size=bytes(12)) + FIRST + END,
            ("l", b""),
            A,
        ),
        good(
            "link-with-a-long-name-without-a-key",
            FIRST + long_name(b"a" * 200, kind=b"K") + member("l", b"", kind=b"2") + SECOND + END,
            A,
            ("l", b""),
            B,
        ),
        good("name-not-utf-8-without-a-key", FIRST + member(b"l\xe9", b"x") + SECOND + END, A, (r"l\xe9", b""), B),
        good("directory-of-no-utf-8", FIRST + member(b"d\xe9/", b"", kind=b"5") + SECOND + END, A, B),
        good(
            "name-cut-inside-a-character-without-a-key",
            FIRST + member(b"n" * 99 + b"\xc3", b"x") + END,
            A,
            ("n" * 99 + r"\xc3", b""),
        ),
        good(
            "gnu-long-name-not-utf-8-without-a-key",
            FIRST + long_name(b"\xff" * 200) + SECOND + END,
            A,
            (r"\xff" * 200, b""),
        ),
        good(
            "solaris-extended",
            FIRST + pax(record(b"path", b"l.txt"), kind=b"X") + SECOND + END,
            A,
            ("l.txt", b"second"),
        ),
        good(
            "gnu-long-name-without-nul",
            FIRST + long_name(_LONG, end=b"") + SECOND + END,
            A,
            (_LONG.decode(), b"second"),
        ),
        good(
            "gnu-long-name-that-its-header-contradicts",
            long_name(_LONG) + member(b"g" + _LONG[1:100], b"x") + END,
            (_LONG.decode(), b"x"),
        ),
        good(
            "gnu-long-name-without-a-key",
            FIRST + long_name(_LONG[:-4]) + SECOND + END,
            A,
            (_LONG[:-4].decode(), b"second"),
        ),
        good("pax-path-with-a-slash-at-its-end", FIRST + pax_path(b"d/") + member("d", b"") + END, A),
        *(
            good(
                f"ustar-of-another-version-{version.hex()}",
                member("n.txt", b"x", magic=b"ustar\x00" + version, prefix=b"p") + END,
                ("p/n.txt", b"x"),
            )
            for version in (b"  ", b" \x00", bytes(2))
        ),
        good("name-without-extension", member("README", b"x") + FIRST + END, ("README", b"x"), A),
        good("name-twice", FIRST + FIRST + END, A, A),
        good("large-member", member("a.bin", LARGE) + SECOND + END, ("a.bin", LARGE), B),
        good(
            "large-members", *_several([LARGE[:65535], LARGE[:65536], b"", LARGE[:65537], LARGE, LARGE[:261_632], b"x"])
        ),
        good("many-members", *_several([b"%d" % number for number in range(700)])),
        good("end-marker-only", END),
        good("end-marker-and-zeros", FIRST + END + bytes(9216), A),
        good("end-marker-and-zeros-to-no-block", FIRST + END + bytes(77), A),
        good("deep-prefix", member(_DEEP[121:], b"x", prefix=_DEEP[:120]) + END, (_DEEP.decode(), b"x")),
    ]


def _global(keyword: bytes, value: bytes) -> bytes:
    """Return a pax header for all members after it."""
    return pax(record(keyword, value), kind=b"g")


def _bad_kinds() -> list[Case]:
    """Return archives with members that are not plain files."""
    kinds = {
        **ODD_KINDS,
        "gnu-old-long-name": (b"N", "unknown type 'N'"),
        "solaris-acl": (b"A", "unknown type 'A'"),
        "star-inode": (b"I", "unknown type 'I'"),
        "unknown-type": (b"Z", "unknown type 'Z'"),
        "type-not-ascii": (b"\xff", "unknown type"),
    }
    cases = [
        Case(name, FIRST + member("l.txt", b"", kind=kind, link=b"a.txt") + SECOND + END, (A,), error, AT)
        for name, (kind, error) in kinds.items()
    ]
    sparse = {
        "sparse-pax-0.0": record(b"GNU.sparse.size", b"2147483648") + record(b"GNU.sparse.numblocks", b"0"),
        "sparse-pax-0.1": record(b"GNU.sparse.map", b"0,1") + record(b"GNU.sparse.name", b"l.txt"),
        "sparse-pax-1.0": record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0"),
        "sparse-pax-0.0-by-size-alone": record(b"GNU.sparse.size", b"9"),
        "sparse-pax-1.0-by-realsize": record(b"path", b"l.txt") + record(b"GNU.sparse.realsize", b"9"),
        "sparse-pax-by-a-keyword-not-ascii": record(b"GNU.sparse.\xff", b"9"),
        "sparse-star": record(b"SCHILY.realsize", b"9"),
        "sparse-solaris": record(b"SUN.holesdata", b" 0 5 9"),
    }
    cases += [
        Case(name, FIRST + pax(body) + member("l.txt", b"x") + END, (A,), "a sparse file by its pax header", AT)
        for name, body in sparse.items()
    ]
    link = pax(record(b"linkpath", b"a.txt"))
    return [
        *cases,
        *(
            Case(f"v7-{name}", FIRST + member("l.txt", b"", kind=kind, link=b"a.txt", magic=V7) + END, (A,), error, AT)
            for name, (kind, error) in kinds.items()
            if name in {"hard-link", "symbolic-link"}
        ),
        *(
            Case(
                f"multi-volume-pax-{name}",
                FIRST + pax(record(b"GNU.volume." + name.encode(), b"1"), kind=b"g") + SECOND + END,
                (A,),
                "part of a multi-volume archive",
                AT,
            )
            for name in ("filename", "size", "offset")
        ),
        Case("hard-link-with-data", FIRST + member("l.txt", b"x", kind=b"1") + END, (A,), "a hard link", AT),
        Case("fifo-with-data", FIRST + member("l", b"x", kind=b"6") + END, (A,), "claims 1 bytes of data", AT),
        *(
            Case(
                name, FIRST + before + member("d/", b"", kind=b"\x00") + END, (A,), "readers disagree", AT + len(before)
            )
            for name, before in {
                "old-folder-by-its-own-header-alone-pax": pax(record(b"path", b"l.txt")),
                "old-folder-by-its-own-header-alone-gnu": long_name(b"l.txt"),
            }.items()
        ),
        Case("sparse-pax-global", FIRST + _global(b"GNU.sparse.major", b"1") + END, (A,), "a sparse file", AT),
        Case("pax-linkpath-global", FIRST + _global(b"linkpath", b"a") + SECOND + END, (A,), "a link", AT),
        Case(
            "gnu-long-link-behind-a-long-name",
            FIRST + long_name(_LONG) + long_name(_LONG, kind=b"K") + SECOND + END,
            (A,),
            "link with a long name",
            AT,
        ),
        Case("pax-linkpath", FIRST + link + SECOND + END, (A,), "a link by its pax header: 'b.txt'", AT),
        Case(
            "gnu-long-link", FIRST + long_name(b"a" * 200, kind=b"K") + SECOND + END, (A,), "link with a long name", AT
        ),
        Case("directory-with-data", FIRST + member("d/", b"x", kind=b"5") + END, (A,), "claims 1 bytes of data", AT),
    ]


def _bad_headers() -> list[Case]:
    """Return archives with an invalid header."""

    def bad(name: str, second: bytes, error: str, offset: int = AT) -> Case:
        return Case(name, FIRST + second + END, (A,), error, offset)

    def sized(name: str, size: bytes, error: str) -> Case:
        return bad(name, member("b.txt", b"second", size=size), error)

    too_long = b"9" * 30 + b" path=a\n"
    return [
        bad("checksum-one-more", member(*B, change=1), "its checksum does not match"),
        bad("checksum-one-less", member(*B, change=-1), "its checksum does not match"),
        bad("checksum-of-zeros", member(*B, checksum=bytes(8)), "is not an octal number"),
        bad("checksum-no-number", member(*B, checksum=b"ABCDEFGH"), "its checksum b'ABCDEFGH' is not an octal number"),
        bad("checksum-negative", member(*B, checksum=b"\xff" * 8), "its checksum is negative"),
        bad("checksum-of-signed-bytes", member("ä.txt", b"x", signed=True), "its checksum does not match"),
        bad("magic-unknown", member(*B, magic=b"USTAR\x0000"), "its magic b'USTAR"),
        sized("size-negative", b"\xff" * 11 + b"\xfb", "its size is negative"),
        sized("size-negative-in-octal", b"-0000000005\x00", "is not an octal number"),
        sized("size-base-256-huge", b"\x80" + b"\x7f" * 11, "is over the limit"),
        sized("size-over-the-limit", b"777777777777", "is over the limit"),
        sized("size-with-an-8", b"00000000008\x00", "is not an octal number"),
        sized("size-with-letters", b"0x000000005\x00", "is not an octal number"),
        sized("size-with-underscore", b"000000000_5\x00", "is not an octal number"),
        sized("size-with-a-space-inside", b"0000000 005\x00", "is not an octal number"),
        sized("size-with-a-nul-before", b"\x000000000006\x00"[:12], "is not an octal number"),
        sized("size-with-a-nul-inside", b"00000\x0000006\x00", "is not an octal number"),
        sized("size-with-a-plus", b"+0000000006\x00", "is not an octal number"),
        sized("size-base-256-that-overflows", b"\x81" + bytes(10) + b"\x06", "is over the limit"),
        sized("size-base-256-most-negative", b"\xc0" + bytes(11), "its size is negative"),
        sized("size-base-256-a-byte-over-the-limit", b"\x80" + ((16 << 30) + 1).to_bytes(11, "big"), "over the limit"),
        sized("size-of-2-to-the-60", b"\x80" + (1 << 60).to_bytes(11, "big"), "its size of 1152921504606846976 bytes"),
        bad("directory-with-a-size-of-nul", member("d/", b"", kind=b"5", size=bytes(12)), "is not an octal number"),
        sized("size-blank", b" " * 12, "is not an octal number"),
        sized("size-of-nul", bytes(12), "is not an octal number"),
        bad("pax-path-twice", pax_path(b"no") + pax_path(b"b.txt") + SECOND, "contradict", AT + 1024),
        bad("pax-size-twice", pax(record(b"size", b"6")) * 2 + SECOND, "contradict", AT + 1024),
        bad("gnu-long-name-twice", long_name(b"no") + long_name(b"b.txt") + SECOND, "contradict", AT + 1024),
        bad("pax-then-gnu-name", pax_path(b"no") + long_name(b"b.txt") + SECOND, "contradict", AT + 1024),
        bad("name-empty", member("", b"x"), "a member has no name"),
        bad("name-not-utf-8", member(b"\xff\xfe.txt", b"x"), "is not UTF-8"),
        bad("pax-path-not-utf-8", pax_path(b"\xff.txt") + SECOND, "is not UTF-8"),
        bad("pax-path-with-nul", pax_path(b"a\x00.txt") + SECOND, "holds a NUL byte", AT + 1024),
        bad("pax-path-empty", pax_path(b"") + SECOND, "an empty name"),
        bad("gnu-name-with-nul", long_name(b"a\x00b.txt") + SECOND, "does not end at its NUL"),
        bad("gnu-name-empty", long_name(b"") + SECOND, "an empty name"),
        bad("pax-without-length", pax(b"path=a\n") + SECOND, "malformed at its byte 0"),
        bad("pax-length-too-small", pax(b"5 path=a\n") + SECOND, "malformed at its byte 0"),
        bad("pax-length-too-large", pax(b"99 path=a\n") + SECOND, "malformed at its byte 0"),
        bad("pax-length-zero", pax(b"0 path=a\n") + SECOND, "malformed at its byte 0"),
        bad("pax-length-negative", pax(b"-9 path=a\n") + SECOND, "malformed at its byte 0"),
        bad("pax-length-endless", pax(too_long) + SECOND, "malformed at its byte 0"),
        bad("pax-without-equals", pax(b"9 pathaa\n") + SECOND, "malformed at its byte 0"),
        bad("pax-without-keyword", pax(b"6 =aa\n") + SECOND, "malformed at its byte 0"),
        bad("pax-without-newline", pax(b"9 path=aa") + SECOND, "malformed at its byte 0"),
        bad("pax-second-record", pax(record(b"path", b"b") + b"x") + SECOND, "malformed at its byte 9"),
        bad("pax-size-negative", pax(record(b"size", b"-5")) + SECOND, "gives the size b'-5'"),
        bad("pax-size-no-number", pax(record(b"size", b"5.0")) + SECOND, "gives the size b'5.0'"),
        bad("pax-size-huge", pax(record(b"size", b"9" * 18)) + SECOND, "is over the limit"),
        bad("pax-size-without-end", pax(record(b"size", b"9" * 400)) + SECOND, "gives the size"),
        bad("pax-global-path", pax(record(b"path", b"b"), kind=b"g") + SECOND, "for all members"),
        bad("pax-global-size", pax(record(b"size", b"5"), kind=b"g") + SECOND, "for all members"),
        bad("pax-header-of-2-mb", pax(bytes(2 << 20)) + SECOND, "an extension header of 2097152 bytes"),
        bad("pax-header-a-byte-over-the-limit", pax(bytes((1 << 20) + 1)) + SECOND, "an extension header of 1048577"),
        bad("pax-header-of-2-to-the-60", header(b"x", b"\x80" + (1 << 60).to_bytes(11, "big"), kind=b"x"), "is over"),
        bad("pax-path-in-a-later-header", pax_path(b"a") + GLOBAL + pax_path(b"b") + SECOND, "contradict", AT + 2048),
        bad("gnu-long-name-over-the-limit", long_name(b"n" * (1 << 20)) + SECOND, "an extension header of 1048577"),
        bad(
            "gnu-long-name-that-its-size-cuts",
            header(b"x", 100, kind=b"L") + padded(_LONG) + SECOND,
            "does not end at its NUL",
        ),
        bad(
            "pax-overrules-a-size",
            pax(record(b"size", b"6")) + member("b.txt", b"x", size=400),
            "header 400",
            AT + 1024,
        ),
        bad("pax-keyword-one-byte-off", pax(record(b"pauh", b"b.txt")) + SECOND, "one byte away"),
        bad("pax-equals-one-byte-off", pax(record(b"path-b", b"b.txt")) + SECOND, "one byte away"),
        bad("pax-record-in-a-value", pax(record(b"uname", b"x\n10 path=b")) + SECOND, "contains another record"),
        bad("gnu-long-name-without-data", long_name(b"", end=b"") + SECOND, "an empty name"),
        bad("name-of-a-surrogate", member(b"\xed\xa0\x80.txt", b"x"), "is not UTF-8"),
        bad("prefix-not-utf-8", member(b"a.txt", b"x", prefix=b"\xff"), "is not UTF-8"),
        bad("gnu-long-link-before-the-end", long_name(_LONG, kind=b"K"), "has no member after it", AT + 1024),
        bad("pax-before-the-end", pax_path(b"b.txt"), "has no member after it", AT + 1024),
        bad("gnu-name-before-the-end", long_name(b"b.txt"), "has no member after it", AT + 1024),
        bad("garbage", b"\xaa" * 512, "bad header"),
        bad("all-bits-set", b"\xff" * 512, "bad header"),
        bad("text", b"Not Found\n" * 60, "bad header"),
    ]


_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def _bad_ends() -> list[Case]:
    """Return streams that end too early or too late."""
    whole = FIRST + SECOND + END
    cut_pax = pax_path(_LONG)

    def bad(name: str, data: bytes, members: tuple[tuple[str, bytes], ...], error: str, offset: int) -> Case:
        return Case(name, data, members, error, offset)

    gzipped = gzip.compress(whole, mtime=0).ljust(512, b"\x00")
    compressed = {
        "gzip": gzipped,
        "xz": lzma.compress(whole).ljust(512, b"\x00"),
        "bzip2": bz2.compress(whole).ljust(512, b"\x00"),
        "zstd": b"\x28\xb5\x2f\xfd".ljust(512, b"\x01"),
        "zip": b"PK\x03\x04".ljust(512, b"\x01"),
    }
    return [
        bad("gzip-of-few-bytes", gzip.compress(b"", mtime=0), (), "this is a gzip file, not a tar", 0),
        bad("git-lfs-pointer", _LFS_POINTER, (), "this is a Git LFS pointer, not the shard", 0),
        bad("html-page", b"<!DOCTYPE html><html><body>Sign in</body></html>".ljust(900), (), "bad header", 0),
        bad("png", b"\x89PNG\r\n\x1a\n".ljust(600, b"\x01"), (), "bad header", 0),
        bad("zero-block-first", bytes(512) + whole, (), "a single zero block", 0),
        bad("zero-block-and-garbage", FIRST + bytes(512) + b"\x01" * 512, (A,), "a single zero block", AT),
        bad("zero-block-and-part-of-another", FIRST + bytes(700), (A,), "stops inside its end marker", AT + 700),
        bad("zero-blocks-between", FIRST + END + SECOND + END, (A,), "another archive follows", AT + 1024),
        bad("byte-in-a-part-of-a-block-behind", FIRST + END + bytes(76) + b"\x01", (A,), "follow the end", AT + 1100),
        bad("cut-in-a-large-member", FIRST + member("l.bin", LARGE)[:200_000], (A,), "inside a member", AT + 200_000),
        bad("cut-in-a-gnu-long-name", FIRST + long_name(_LONG)[:600], (A,), "stops inside a member of", AT + 600),
        bad("cut-behind-a-gnu-long-name", FIRST + long_name(_LONG), (A,), "stops before its end marker", AT + 1024),
        bad("cut-behind-a-directory", FIRST + member("d/", b"", kind=b"5"), (A,), "before its end marker", AT + 512),
        bad("no-bytes", b"", (), "stops before its end marker", 0),
        bad("one-byte", b"a", (), "stops inside a header", 1),
        bad("one-zero-byte", b"\x00", (), "stops inside a header", 1),
        bad("half-a-header", FIRST + SECOND[:200], (A,), "stops inside a header", AT + 200),
        bad("no-end-marker", FIRST + SECOND, (A, B), "stops before its end marker", 2 * AT),
        bad("half-an-end-marker", FIRST + END[:512], (A,), "stops inside its end marker", AT + 512),
        bad("end-marker-less-a-byte", FIRST + END[:-1], (A,), "stops inside its end marker", AT + 1023),
        bad("zero-block-between", FIRST + bytes(512) + SECOND + END, (A,), "a single zero block", AT),
        bad("second-archive-behind", whole + whole, (A, B), "another archive follows", 2 * AT + 1024),
        bad("second-archive-behind-zeros", whole + bytes(8192) + whole, (A, B), "another archive", 2 * AT + 9216),
        bad("second-archive-cut", whole + whole[:400], (A, B), "bytes other than zero follow", 2 * AT + 1024),
        bad("byte-behind-the-end", FIRST + END + b"\x01", (A,), "follow the end marker", AT + 1024),
        bad(
            "byte-far-behind-the-end", FIRST + END + bytes(300_000) + b"x", (A,), "follow the end marker", AT + 301_024
        ),
        bad("cut-in-data", FIRST + SECOND[:514], (A,), "stops inside a member of 6 bytes", AT + 514),
        bad("cut-in-padding", FIRST + SECOND[:600], (A,), "stops inside a member of 6 bytes", AT + 600),
        bad("cut-before-data", FIRST + SECOND[:512], (A,), "stops inside a member of 6 bytes", AT + 512),
        bad("cut-in-pax", FIRST + cut_pax[:700], (A,), "stops inside a member of", AT + 700),
        bad("cut-behind-pax", FIRST + cut_pax, (A,), "stops before its end marker", AT + len(cut_pax)),
        bad(
            "size-beyond-the-end",
            FIRST + header(b"b.txt", (1 << 33) - 1) + END,
            (A,),
            "stops inside a member of",
            AT + 1536,
        ),
        *(bad(name, data, (), f"this is a {name} file, not a tar", 0) for name, data in compressed.items()),
    ]


TARS = GOLDEN / "tar"

_FOLDER = "d" * 60
_DEEPEST = f"{_FOLDER}/{'e' * 60}/long.name.txt"
FILES = {"a.jpg": b"\xff\xd8" + b"a" * 600, "a.json": b'{"n": 1}', "ä.txt": b"", _DEEPEST: b"x" * 512}
HOLE = "hole.bin"  # 1 MiB with three bytes at its end
_ALL = tuple(FILES.items())
_SHORT = _ALL[:3]
_SPARSE = ["-S", "--hole-detection=raw", "a.json", HOLE]
_PAX = ["--format=posix", "--pax-option=delete=atime,delete=ctime"]

# Arguments of GNU tar, the members that are read, and the error after them (None: no error).
GNU_TAR: dict[str, tuple[list[str], tuple[tuple[str, bytes], ...], str | None]] = {
    "ustar": (["--format=ustar", *FILES], _ALL, None),
    "gnu": (["--format=gnu", *FILES], _ALL, None),
    "oldgnu": (["--format=oldgnu", *FILES], _ALL, None),
    "pax": (["--format=posix", *FILES], _ALL, None),
    "pax-fractional-times": (["--format=posix", "--mtime=2001-01-01 00:00:00.25", *FILES], _ALL, None),
    "pax-global": (["--format=posix", "--pax-option=comment=a note", *FILES], _ALL, None),
    "v7": (["--format=v7", *FILES][:4], _SHORT, None),
    "folders": (["--format=gnu", f"./{_FOLDER}"], ((f"./{_DEEPEST}", FILES[_DEEPEST]),), None),
    "incremental-pax": (["--format=posix", "--incremental", _FOLDER], _ALL[3:], None),
    "label-pax": (["--format=posix", "--label=x", *FILES], _ALL, None),
    "label-gnu": (["--format=gnu", "--label=x", *FILES], (("x", b""), *_ALL), None),
    "incremental-gnu": (
        ["--format=gnu", "--incremental", _FOLDER],
        ((f"{_FOLDER}/", b""), (f"{_FOLDER}/{'e' * 60}/", b""), *_ALL[3:]),
        None,
    ),
    "hard-link": (["--format=gnu", "a.jpg", "same.jpg"], _ALL[:1], "a hard link"),
    "symbolic-link": (["--format=ustar", "a.jpg", "link.jpg"], _ALL[:1], "a symbolic link"),
    "symbolic-link-long": (["--format=gnu", "a.jpg", "far.jpg"], _ALL[:1], "a symbolic link: 'far.jpg'"),
    "symbolic-link-pax": ([*_PAX, "a.jpg", "far.jpg"], _ALL[:1], "a symbolic link: 'far.jpg'"),
    "fifo": (["--format=gnu", "a.jpg", "fifo"], (_ALL[0], ("fifo", b"")), None),
    "sparse-gnu": (["--format=gnu", *_SPARSE], _ALL[1:2], "a sparse file"),
    "sparse-pax-0.0": ([*_PAX, "--sparse-version=0.0", *_SPARSE], _ALL[1:2], "a sparse file by its pax header"),
    "sparse-pax-0.1": ([*_PAX, "--sparse-version=0.1", *_SPARSE], _ALL[1:2], "a sparse file by its pax header"),
    "sparse-pax-1.0": ([*_PAX, "--sparse-version=1.0", *_SPARSE], _ALL[1:2], "a sparse file by its pax header"),
}


def plant(folder: Path) -> None:
    """Write the files that GNU tar packs."""
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with (folder / HOLE).open("wb") as file:
        file.seek((1 << 20) - 3)
        file.write(b"end")
    (folder / "same.jpg").hardlink_to(folder / "a.jpg")
    (folder / "link.jpg").symlink_to("a.jpg")
    (folder / "far.jpg").symlink_to("f" * 150)
    os.mkfifo(folder / "fifo")


def file_of(archive: tarfile.TarFile, info: tarfile.TarInfo) -> tuple[str, bytes]:
    """Return the name and the data of a member that Python's tarfile reads; no data if it is no plain file."""
    raw = info.name.encode(errors="surrogateescape")
    name = raw.decode(errors="backslashreplace")
    is_odd = any(keyword.startswith(("linkpath", "GNU.sparse.")) for keyword in info.pax_headers)
    is_plain = info.isreg() and not info.issparse() and not is_odd and name.encode() == raw
    return name, archive.extractfile(info).read() if is_plain else b""


def write_with_gnu_tar(name: str, folder: Path, path: Path) -> bytes:
    """Write the archive `name` of `GNU_TAR` from what `plant` put into `folder`, and return its bytes."""
    fixed = ["--sort=name", "--mtime=@0", "--owner=u:1000", "--group=g:1000", "--blocking-factor=1"]
    words = ["tar", *fixed, "-cf", str(path), *GNU_TAR[name][0]]
    subprocess.run(words, cwd=folder, env={**os.environ, "LC_ALL": "C.UTF-8"}, check=True, capture_output=True)
    return path.read_bytes()


def _end_of(members: tuple[tuple[str, bytes], ...]) -> int:
    """Return the offset of the end of plain members."""
    return sum(512 + len(padded(data)) for _, data in members)


def _foreign() -> list[Case]:
    """Return the archives of other programs."""
    cases = [
        Case(f"gnu-tar-{name}", (TARS / f"{name}.tar").read_bytes(), members, error, error and _end_of(members))
        for name, (_, members, error) in GNU_TAR.items()
    ]
    part = "part of a multi-volume archive"
    return [
        *cases,
        Case(
            "gnu-tar-volume-2-gnu",
            (TARS / "volume-2-gnu.tar").read_bytes(),
            (),
            "of a multi-volume archive",
            0,
        ),
        Case("gnu-tar-volume-2-pax", (TARS / "volume-2-pax.tar").read_bytes(), (), part, 0),
        Case("git-archive-of-nothing", (TARS / "git-empty.tar").read_bytes(), ()),
        Case("perl-archive-tar", (TARS / "perl.tar").read_bytes(), _SHORT),
    ]


CASES = [*_good(), *_bad_kinds(), *_bad_headers(), *_bad_ends(), *_foreign()]
