"""wdskit's reader of YAML."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.config.load import Document
from wdskit.limits import MAX_CONFIG_BYTES

SCALARS = [
    ("", None), ("~", None), ("null", None), ("NULL", None), ("nUll", "nUll"),
    ("true", True), ("True", True), ("FALSE", False), ("tRue", "tRue"),
    ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"),
    ("0", 0), ("7", 7), ("-12", -12), ("+3", 3), ("0x1f", 31), ("0o17", 15), ("0b11", "0b11"), ("1_000", "1_000"),
    ("1.5", 1.5), ("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("-.5", -0.5), ("5.", 5.0), ("0.5", 0.5), ("1e5", 1e5),
    ("-.inf", float("-inf")), (".INF", float("inf")), ("inf", "inf"), ("nan", "nan"), (".", "."),
    ("-", None), ("+", "+"),
    ("2024-01-31", "2024-01-31"), ("1.2.3", "1.2.3"), ("12:90", "12:90"), ("a:b", "a:b"), ("12e", "12e"),
]  # fmt: skip


def read(text: str, **environment: str) -> Document:
    document = Document("train.yaml")
    with patch.dict(os.environ, environment, clear=True):
        document.read_yaml(text)
    return document


def rules(document: Document) -> str:
    return " ".join(rule for _, _, rule in document.problems)


@pytest.mark.parametrize(("text", "value"), [pair for pair in SCALARS if pair[0] != "-"])
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """The core schema: `no` is text, `1e-3` a number, a date text."""
    document = read(f"x: {text}")
    assert not document.problems
    assert document.tree == {"x": value}
    assert type(document.tree["x"]) is type(value)


@pytest.mark.parametrize("text", [text for text, _ in SCALARS])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_quoted_scalars_stay_text(text: str, quote: str) -> None:
    """A quoted scalar is always text."""
    assert read(f"x: {quote}{text}{quote}").tree == {"x": text}


@pytest.mark.parametrize("text", ["12:30:45", "1:30", "-190:20:30.15", "00012", "-07", "01.5", "9" * 26])
def test_what_readers_disagree_about_is_refused(text: str) -> None:
    """The message says to quote the scalar."""
    document = read(f"x: {text}")
    assert "quotes" in rules(document)
    assert [path for _, path, _ in document.problems] == [("x",)]


def test_lines_are_those_of_the_file() -> None:
    """Each path has its line, items of lists included."""
    document = read("# first\na:\n  - b: 1\n  -\n    c: 2\n\nd: [x,\n  y]\n")
    wanted = {(): 2, ("a",): 2, ("a", 0): 3, ("a", 0, "b"): 3, ("a", 1): 5, ("a", 1, "c"): 5}
    assert {path: line for path, (line, _) in document.places.items()} == wanted | {("d",): 7, ("d", 0): 7, ("d", 1): 8}


def test_variables() -> None:
    """They are filled in before types are assigned; quoted scalars stay text; values are not searched for variables."""
    text = 'a: ${N}\nb: "${N}"\nc: ${NO:-1.5}\nd: ${EMPTY:-x}${EMPTY}\ne: $$N $$${N} $N\nf: ${NEST}\ng: ${NO:-}\n'
    document = read(text, N="5", EMPTY="", NEST="${N}")
    assert not document.problems
    assert document.tree == {"a": 5, "b": "5", "c": 1.5, "d": "x", "e": "$N $5 $N", "f": "${N}", "g": None}


@pytest.mark.parametrize("text", ["${NO}", "${", "${}", "${A-b}", "${1A}", "${A:-${B}}", "${ A }"])
def test_a_variable_that_cannot_be_filled_in_is_a_problem(text: str) -> None:
    """It is never replaced by an empty text."""
    document = read(f'x: "{text}"', B="b")
    assert len(document.problems) == 1
    assert [path for _, path, _ in document.problems] == [("x",)]


def test_a_value_with_a_control_character_is_a_problem() -> None:
    """This includes values of the environment, and half characters of a broken locale."""
    assert "U+0001" in rules(read("x: ${A}", A="a\1"))
    assert "U+DCFF" in rules(read("x: ${A}", A="a\udcff"))


def test_reading_goes_on_behind_a_problem() -> None:
    """All problems of a file are listed at once."""
    document = read("a: 00012\nd: ${NO}\na: 2\n<<: {}\n[x]: 4\ne: fine\n")
    assert [line for (line, _), *_ in document.problems] == [1, 2, 3, 4, 5]
    assert document.tree["e"] == "fine"


ATTACKS = {
    "brackets": "[" * 100_000,
    "braces": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "question marks": "? " * 100_000,
    "bracket names": "{[" * 50_000,
    "aliases": "a: &a [x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\n",
    "digits": "a: " + "9" * 100_000,
    "version": "%YAML 1." + "9" * 100_000 + "\n---\na: 1",
    "nul": "a: \0",
    "escape": 'a: "\\U7FFFFFFF"',
    "long name": "x" * 50_000 + ": " + "[a]: b" * 10,
    "many values": "[" + "1," * (MAX_CONFIG_BYTES // 2 - 1) + "[",
    "many problems": "a: 1\n" * 50_000,
    "tags": "!" * 100_000,
    "reference": "a: " + "&a " * 10_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_text_is_refused_quickly(name: str) -> None:
    """No crash, no long wait, no long message."""
    start = time.process_time()
    document = read(ATTACKS[name])
    assert time.process_time() - start < 20  # the slowest takes seconds on a busy machine; without limits, minutes
    assert document.problems
    assert all(len(rule) < 500 for _, _, rule in document.problems)


YAML_PIECES = st.sampled_from([
    "a", "b", ": ", ":", "- ", "\n", "\n  ", "[", "]", "{", "}", ", ", "'", '"', "&x ", "*x", "!t ", "|\n", ">\n", "#",
    "? ",
    "1", "0", "~", "<<", "---\n", "...\n", "%", "@", "\\", "\\U", "\t", "${", "}", "$$", "é", "\u2028", "\0", "\ufeff",
])  # fmt: skip


@given(st.one_of(st.text(), st.lists(YAML_PIECES, max_size=40).map("".join)))
def test_any_text_is_read_or_refused(data: str) -> None:
    """The reader raises nothing. A tree has only plain values, and every value has a line."""
    document = read(data)
    assert document.places or document.problems
    stack = [document.tree]
    while stack:
        value = stack.pop()
        assert type(value) in {dict, list, str, int, float, bool, type(None)}
        stack += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a: {b: ${X:-24}}", {"a": {"b": 24}}),
        ("a: [${X:-24}, ${Y}]", {"a": [24, "q,r]"]}),
        ("a: [${X:-1,2}, x${X:-{3}]", {"a": ["1,2", "x{3"]}),
        ("a: ${X:-one: two #3}", {"a": "one: two #3"}),
        ("{a: ${X:-1e-3}, b: '${X:-5}', c: \"${X:-5}\"}", {"a": 1e-3, "b": "5", "c": "5"}),
        ("# ${X:-{\na: ${N:-true}", {"a": True}),
    ],
)
def test_a_variable_needs_no_quotes_in_brackets(text: str, tree: object) -> None:
    """The text in `${...}` is not YAML syntax, in block style and in flow style."""
    document = read(text, Y="q,r]")
    assert (document.tree, document.problems) == (tree, [])
