"""Expressions over a sample's key and its JSON, number and text fields: `json.width >= 256 and cls in (1, 2)`.

simpleeval walks Python's syntax tree. This module lists the allowed nodes. An expression with any other node is refused
before a sample is read: no assignment, comprehension, lambda, format string, slice or power. The allowed methods are
the text methods in `_TEXT_METHODS` and `get` of a JSON object. The size of numbers, texts and lists is limited, also
the length of a text to search for. So an expression reads nothing but the sample, takes time in proportion to the
length of the sample's fields, and may come from an untrusted user.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS
from wdskit.dataset.expressions import MAX_CHARS, parse_expression, short_repr

if TYPE_CHECKING:
    from simpleeval import SimpleEval

MAX_BITS = 4096
"""Most bits of an integer in a result."""

ReadField = Callable[[str], object]
"""Returns the value of the field with this name."""

_NAMES = ("key", "fields")
_FIELDS = JSON_FIELDS | INT_FIELDS | TEXT_FIELDS
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "bool": bool, "float": float, "int": int, "len": len, "max": max, "min": min,
}  # fmt: skip
_TEXT_METHODS = frozenset([
    "startswith", "endswith", "lower", "upper", "casefold", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix",
    "split", "count", "find", "isalpha", "isascii", "isalnum", "isdecimal", "isdigit", "islower", "isupper",
])  # fmt: skip
_METHODS = _TEXT_METHODS | {"get"}
_PLAIN_NODES = (ast.Constant, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Set)
_HELPERS = (ast.Load, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
_CONSTANTS = (str, int, float, bool, type(None))


class ExpressionError(ValueError):
    """An expression has no valid result for a sample. The message says why, but does not name the sample."""


class MissingValue(ExpressionError):
    """An expression reads a value that the sample does not have: a field, or a member or item of its JSON."""


class Expression:
    """A condition on samples. A pickle has only the text.

    Args:
        text: Python's syntax. `key` is the sample's key and `fields` the names of its fields. `json`, `cls`, `txt` and
            other JSON, number and text fields are the values of these fields; `json.a.b` is `json["a"]["b"]`.

    Attributes:
        text: The expression.
        fields: Names of the fields that the expression may read.

    Raises:
        SelectionError: The text is not an allowed expression. The message gives the position in the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = parse_expression(text, _problem, what="filter")
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        self.fields = frozenset(names - {*_NAMES, *_FUNCTIONS})
        self._evaluator: SimpleEval | None = None
        self._own_nodes: dict[type[ast.AST], Callable[[Any], Any]] = {
            ast.Name: self._name,
            ast.Attribute: lambda node: _item(self._value(node.value), node.attr),
            ast.Subscript: lambda node: _item(self._value(node.value), self._value(node.slice)),
        }  # fmt: skip
        self._key: str = ""
        self._names: Collection[str] = ()
        self._read: ReadField = str

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        """Return what a pickle contains: the class and the text."""
        return Expression, (self.text,)

    def holds(self, key: str, fields: Collection[str], read: ReadField) -> bool:
        """Return whether the condition is true for a sample.

        Args:
            key: The sample's key.
            fields: The names of the sample's fields.
            read: Called with the name of a field. Returns its value. Only fields that decide the result are read.

        Raises:
            MissingValue: The sample lacks a field, or its JSON lacks a member or an item.
            ExpressionError: The result is not True or False, or cannot be computed.
            DecodeError: `read` cannot decode a field.
        """
        if self._evaluator is None:
            from simpleeval import EvalWithCompoundTypes

            self._evaluator = EvalWithCompoundTypes(operators=_OPERATORS, functions={}, names={})
            nodes = self._evaluator.nodes
            plain_nodes = {kind: nodes[kind] for kind in _PLAIN_NODES if kind in nodes}
            self._evaluator.nodes = {**plain_nodes, **self._own_nodes, ast.Call: self._call}
        self._key, self._names, self._read = key, fields, read
        try:
            answer = self._evaluator.eval(self.text, self._tree)
        except ExpressionError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as err:
            raise ExpressionError(str(err) or type(err).__name__) from err
        if not isinstance(answer, bool):
            raise ExpressionError(f"its result is {short_repr(answer)}, neither true nor false")
        return answer

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a node of the expression for the current sample."""
        # simpleeval does not look up names: it would check every value of a JSON.
        if type(node) in self._own_nodes:
            return self._own_nodes[type(node)](node)
        assert self._evaluator is not None
        return self._evaluator.eval(self.text, node)

    def _name(self, node: Any) -> Any:
        name = node.id
        if name == "key":
            return self._key
        if name == "fields":
            return tuple(self._names)
        if name not in self._names:
            raise MissingValue(f"it has no field {name!r}")
        return self._read(name)

    def _call(self, node: Any) -> Any:
        values = [self._value(each) for each in node.args]
        if isinstance(node.func, ast.Name):
            return _FUNCTIONS[node.func.id](*values)
        owner, name = self._value(node.func.value), node.func.attr
        if not (name == "get" if isinstance(owner, dict) else isinstance(owner, str) and name in _TEXT_METHODS):
            raise ExpressionError(f"{short_repr(owner)} has no {name}()")
        for value in values:
            for each in value if isinstance(value, tuple) else (value,):
                _check_searched(each)
        return getattr(owner, name)(*values)


def _problem(node: ast.AST) -> str:
    """Return why a node is not allowed in an expression; "" if the node is allowed. Its children are not checked."""
    match node:
        case ast.Constant():
            kinds = "text, numbers, True, False and None"
            return "" if type(node.value) in _CONSTANTS else f"it holds {node.value!r}; it can hold {kinds}"
        case ast.Name():
            known = ", ".join([*_NAMES, *sorted(_FIELDS)])
            return "" if node.id in _NAMES or node.id in _FIELDS else f"there is no {node.id!r}; there are {known}"
        case ast.Attribute():
            return f"{node.attr!r} begins with an underscore" if node.attr.startswith("_") else ""
        case ast.Subscript():
            return "slices are not supported" if isinstance(node.slice, ast.Slice) else ""
        case ast.Call() if node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
            return "keyword arguments are not supported"
        case ast.Call(func=ast.Name(id=name)):
            return "" if name in _FUNCTIONS else f"there is no function {name}(); there are {', '.join(_FUNCTIONS)}"
        case ast.Call(func=ast.Attribute(attr=name)):
            return "" if name in _METHODS else f"there is no method {name}(); there are {', '.join(sorted(_METHODS))}"
        case ast.Call():
            return "only functions and methods with a name can be called"
        case ast.BinOp() | ast.UnaryOp():
            return "" if type(node.op) in _OPERATORS else f"{type(node.op).__name__} is not a supported operation"
    return "" if isinstance(node, (*_PLAIN_NODES, *_HELPERS)) else f"{type(node).__name__} is not supported"


def _item(owner: Any, name: Any) -> Any:
    """Return `owner[name]`: a member of a JSON object, or an item of a list or a text. MissingValue: There is no such
    member or item. ExpressionError: `owner` is not an object, a list or a text, or `name` is not an integer for a list
    or a text. As in Python, a negative integer counts from the end.
    """
    if isinstance(owner, dict):
        if name not in owner:
            raise MissingValue(f"there is no {name!r} in {short_repr(list(owner))}")
        return owner[name]
    if not isinstance(owner, list | tuple | str) or type(name) is not int:
        raise ExpressionError(f"{short_repr(owner)} has no {name!r}")
    if not -len(owner) <= name < len(owner):
        raise MissingValue(f"there is no item {name} in {short_repr(owner)}")
    return owner[name]


def _check_searched(value: object) -> None:
    """Raise ExpressionError if a value to search for is a text of over `MAX_CHARS` characters."""
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise ExpressionError(
            f"{short_repr(value)} has {len(value)} characters, more than the {MAX_CHARS} to search for"
        )


def _contains(item: Any, group: Any) -> bool:
    if isinstance(group, str):
        _check_searched(item)
    return item in group


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with limits: ExpressionError if an argument is not a number, or if the result is an integer of
    over `MAX_BITS` bits.
    """

    def limited(*values: Any) -> Any:
        for value in values:
            if not isinstance(value, int | float):  # `*` would repeat a text or a list
                raise ExpressionError(f"{short_repr(value)} is not a number")
        result = function(*values)
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise ExpressionError(f"a number has more than {MAX_BITS} bits")
        return result

    return limited


_NUMERIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{kind: _on_numbers(function) for kind, function in _NUMERIC.items()},
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.IsNot: operator.is_not,
    ast.In: _contains, ast.NotIn: lambda item, group: not _contains(item, group),
}  # fmt: skip
