"""YAML into plain Python values, by hand: no constructor, no recursion, no surprise.

PyYAML's parser gives the events; what they mean is decided here. Scalars are typed by the core schema of YAML 1.2. What
lets two readers see two things (duplicate keys, merge keys, tags, base 60) or makes a small file large (aliases) is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from wdskit.limits import MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH
from wdskit.pipeline.problems import Path, show, yaml_advice
from wdskit.pipeline.scalars import ScalarError, Variables, check_text, type_plain

_BAD_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


class Fault(NamedTuple):
    """One thing wrong with the text: at which line (from 1), below which path, and what."""

    line: int
    path: Path
    rule: str


@dataclass
class Document:
    """What a text holds.

    Attributes:
        tree: dicts, lists, str, int, float, bool and None; None where nothing could be read.
        lines: For each path, the line (from 1) of its key, or of the value where there is no key.
        faults: All that is wrong, in the order of the text.
        spoiled: Paths whose value is a stand-in, because the fault there has been told.
        complete: Whether the text was read to its end.
    """

    tree: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    spoiled: set[Path] = field(default_factory=set)
    complete: bool = False


MAX_FAULTS = 100
"""Reading stops at so many; whoever has a hundred problems mends some first."""

MAX_NODES = 100_000
NUMBERED = {("weight",)}
"""Last parts of the paths of mappings whose names are numbers: a schedule, `weight: {0: 1.0, 10000: 0.2}`."""
"""Most values in one document. A large configuration has some hundreds; this many take PyYAML three seconds."""


class _Stop(Exception):
    pass


def read_document(data: bytes | str, *, environment: Mapping[str, str] | None = None) -> Document:
    """Read one YAML document. Never raises for what the text holds: it is all in `faults`.

    Args:
        data: The text, in UTF-8 where it is bytes.
        environment: For `${NAME}`; by default the process's.
    """
    builder = _Builder(Variables(environment))
    text = _decode(data, builder.document)
    if text is None:
        return builder.document
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except _Stop:
        return builder.document
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        builder.document.faults.append(Fault(mark.line + 1 if mark else 1, (), _plain_english(err)))
        return builder.document
    except (yaml.YAMLError, ValueError, OverflowError, IndexError):
        # what PyYAML's scanner lets through: an escape beyond Unicode, a %YAML version of many digits
        rule = "this is not YAML. Look for an escape such as \\U that names no character."
        builder.document.faults.append(Fault(builder.line, (), rule))
        return builder.document
    if not builder.num_documents:
        builder.document.faults.append(Fault(1, (), "the document is empty."))
        return builder.document
    builder.document.complete = True
    return builder.document


def _decode(data: bytes | str, document: Document) -> str | None:
    """The text, or None with the fault noted."""
    if len(data) > MAX_CONFIG_BYTES:
        document.faults.append(
            Fault(1, (), f"it has more than {MAX_CONFIG_BYTES} bytes; no configuration is that long.")
        )
        return None
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as err:
        line = err.object.count(b"\n", 0, err.start) + 1
        rule = f"byte {err.start} (0x{err.object[err.start]:02x}) is not UTF-8. Save the file as UTF-8."
        document.faults.append(Fault(line, (), rule))
        return None
    text = text.removeprefix("\ufeff")
    if bad := _BAD_CHARACTER.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        document.faults.append(Fault(line, (), f"the character U+{ord(bad[0]):04X} cannot stand in YAML; remove it."))
        return None
    return text


def _plain_english(err: yaml.MarkedYAMLError) -> str:
    problem = err.problem or err.context or "it cannot be read"
    advice = yaml_advice(problem)
    context = f" ({err.context}, line {err.context_mark.line + 1})" if err.context and err.context_mark else ""
    problem = problem.replace("'\\x00'", "the end").replace("'<stream end>'", "the end")
    return f"this is not YAML: {problem}{context}.{f' {advice}' if advice else ''}"


@dataclass
class _Frame:
    """A list or mapping that is being read."""

    value: list[Any] | dict[str, Any]
    path: Path
    key: str | None = None  # of the mapping's pair whose value comes next
    drop: bool = False  # whether that value goes nowhere, because its key was refused


class _Builder:
    """Takes events one by one and grows the document on an explicit stack."""

    def __init__(self, variables: Variables) -> None:
        self.document = Document()
        self.variables = variables
        self.num_documents = 0
        self.num_nodes = 0
        self.line = 1
        self.stack: list[_Frame] = []
        self.skipping = 0  # open lists and mappings of a node that goes nowhere

    def take(self, event: yaml.Event) -> None:
        """One event of the parser."""
        self.line = event.start_mark.line + 1 if event.start_mark else self.line
        self.num_nodes += isinstance(event, yaml.NodeEvent)
        if self.num_nodes > MAX_NODES:
            self.fault(self.line, f"it holds more than {MAX_NODES} values; no configuration is that long.", ())
            raise _Stop
        if self.skipping:
            self._skip(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._start(event)
        elif isinstance(event, yaml.AliasEvent):
            self._refused_node(f"the alias `*{event.anchor}` stands for a copy; write the value itself.")
        elif isinstance(event, yaml.NodeEvent):
            self._node(event)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self.stack.pop()

    def fault(self, line: int, rule: str, path: Path | None = None) -> None:
        """Note what is wrong, at the place that is being read unless `path` says another."""
        self.document.faults.append(Fault(line, self._path() if path is None else path, rule))
        if len(self.document.faults) >= MAX_FAULTS:
            raise _Stop

    def _path(self) -> Path:
        """Of the node that comes next."""
        if not self.stack:
            return ()
        frame = self.stack[-1]
        if isinstance(frame.value, list):
            return (*frame.path, len(frame.value))
        return frame.path if frame.key is None else (*frame.path, frame.key)

    def _start(self, event: yaml.DocumentStartEvent) -> None:
        self.num_documents += 1
        if self.num_documents > 1:
            self.fault(self.line, "a second document starts here; a configuration is one document.", ())
            raise _Stop
        if event.tags:
            self.fault(self.line, "`%TAG` has no meaning here; remove the line.", ())

    def _node(self, event: Any) -> None:
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.value, dict) and frame.key is None:
            self._key(frame, event)
            return
        path = self._path()
        self._check_properties(event, path)
        if isinstance(event, yaml.ScalarEvent):
            self._place(self._scalar(event, path))
            return
        self._check_depth()
        value: list[Any] | dict[str, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        self._place(value)
        self.stack.append(_Frame(value, path))

    def _check_depth(self) -> None:
        """Before a list or mapping is opened."""
        if len(self.stack) + self.skipping >= MAX_CONFIG_DEPTH:
            self.fault(self.line, f"it is nested deeper than {MAX_CONFIG_DEPTH} levels.", ())
            raise _Stop

    def _key(self, frame: _Frame, event: Any) -> None:
        """The key of a pair. One that is refused still takes its value, which then goes nowhere."""
        rule = self._key_rule(frame, event)
        if rule:
            self.fault(self.line, rule, frame.path)
            self._spoil_unread(frame, event)
        if not isinstance(event, yaml.ScalarEvent):
            frame.key, frame.drop = "?", True
            self.skipping = 1
            return
        frame.key = event.value
        frame.drop = bool(rule)
        self._check_properties(event, frame.path)
        self.document.lines.setdefault((*frame.path, event.value), self.line)

    def _spoil_unread(self, frame: _Frame, event: Any) -> None:
        """A name that cannot be read may be the one that will be missed."""
        if not isinstance(event, yaml.ScalarEvent) or event.value not in frame.value:
            self.document.spoiled.add((*frame.path, "?"))

    def _key_rule(self, frame: _Frame, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            return "a list or mapping stands where a name is needed. Text that starts with `[` or `{` needs quotes."
        key = event.value
        if key in frame.value:
            first = self.document.lines.get((*frame.path, key), self.line)
            return f"{show(key)} stands twice in this mapping, first at line {first}. Remove one."
        if not event.implicit[0]:
            return ""
        if key == "<<":
            return "the merge key `<<` is not supported; write the settings out."
        if "${" in key:
            return f"{show(key)}: variables are filled into values, not into names."
        try:
            typed = type_plain(key)
        except ScalarError as err:
            return str(err)
        if isinstance(typed, str) or (type(typed) is int and frame.path[-1:] in NUMBERED):
            return ""
        return f"the name {show(typed)} is no text. Put it in quotes."

    def _check_properties(self, event: Any, path: Path) -> None:
        if event.anchor is not None:
            self.fault(self.line, f"the anchor `&{event.anchor}` is not supported; remove it.", path)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            self.fault(self.line, f"the tag {show(tag)} is not supported; remove it. Quotes make text.", path)
            self.document.spoiled.add(path)

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> Any:
        try:
            text = check_text(self.variables.fill(event.value))
            return type_plain(text) if event.implicit[0] else text
        except ScalarError as err:
            self.fault(self.line, str(err), path)
            self.document.spoiled.add(path)
            return event.value

    def _refused_node(self, rule: str) -> None:
        """A node that cannot be read: null takes its place."""
        frame = self.stack[-1] if self.stack else None
        self.fault(self.line, rule)
        if frame is not None and isinstance(frame.value, dict) and frame.key is None:
            self.document.spoiled.add((*frame.path, "?"))
            frame.key, frame.drop = "?", True
            return
        self.document.spoiled.add(self._path())
        self._place(None)

    def _place(self, value: Any) -> None:
        """Put a value where it belongs."""
        self.document.lines.setdefault(self._path(), self.line)
        if not self.stack:
            self.document.tree = value
            return
        frame = self.stack[-1]
        if isinstance(frame.value, list):
            frame.value.append(value)
            return
        if not frame.drop:
            frame.value[frame.key or ""] = value
        frame.key, frame.drop = None, False

    def _skip(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            self.skipping += 1
            self._check_depth()
        elif isinstance(event, yaml.CollectionEndEvent):
            self.skipping -= 1
