"""Conditions on columns: `width >= 256 and cls in [1, 2]`, evaluated on whole columns.

The syntax is Python's, with `and`, `or`, `not`, comparisons, `in`, and arithmetic. A name is a column, and dots belong
to this name. Text can be compared by ==, != and `in`. A missing number is NaN, for which every comparison except `!=`
is false. A missing text is "".
"""

from __future__ import annotations

import ast
import functools
import keyword
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.columns import Column, Columns, TextColumn
from wdskit.errors import SelectionError

_CHUNK = 1 << 20  # samples that are evaluated together
_EDGE = 2.0**63
_MAX_CHARS = 2000
_MAX_DEPTH = 40
_KEYWORD = re.compile(rf"\b\w+(?:\.\w+)*?\.({'|'.join(keyword.kwlist)})\b(?:\.\w+)*")  # in the path of a column

Mask = NDArray[np.bool_]


_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide, ast.Mod: np.mod,
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp, ast.Compare, ast.In, ast.NotIn,
    ast.List, ast.Tuple, ast.Set, ast.Name, ast.Attribute, ast.Load, *_ARITHMETIC, *_COMPARISONS,
)  # fmt: skip


class Where:
    """A condition on the columns of a folder, such as `width >= 256`. A pickle has only the text.

    Attributes:
        text: The condition.
        names: Names of the columns in the condition, sorted.

    Raises:
        SelectionError: The text is not a condition, or has no column name. The message gives the position in the text,
            if known. `mask` checks that the columns exist.
    """

    def __init__(self, text: str) -> None:
        self.text = text = str(text)
        self._tree = _parse(text)
        self.names = sorted(set(_names(self._tree)))
        if not self.names:
            raise _error(text, "it names no column")

    def __reduce__(self) -> tuple[type[Where], tuple[str]]:
        """Return what a pickle contains: the class and the text."""
        return Where, (self.text,)

    def mask(self, columns: Columns) -> Mask:
        """Return for each sample of a folder whether the condition is true, bool (num_samples,).

        One comparison of 10^8 samples takes half a second. The only large array in memory is the result.

        Raises:
            SelectionError: A column is missing or damaged. Or an operation does not fit its values, such as text
                compared with a number. Or the result is not a bool, `//` or `%` divides a whole number by 0, or a
                whole number has more than 64 bits.
            StorageError: The file of a remote column cannot be copied.
        """
        used: dict[str, Column] = {name: columns.column(name) for name in self.names}
        mask = np.empty(next(iter(used.values())).num_samples, dtype=np.bool_)
        first = 0
        for parts in zip(*(column.chunks(_CHUNK) for column in used.values()), strict=True):
            values = {name: _load(column, part) for (name, column), part in zip(used.items(), parts, strict=True)}
            with np.errstate(all="ignore"):  # a division of fractions by 0 is inf or NaN
                mask[first : first + len(parts[0])] = self._as_mask(self._value(self._tree, values))
            first += len(parts[0])
        return mask

    def _value(self, node: ast.expr, values: dict[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return values[_dotted(node) or ""]
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._value(each, values) for each in node.elts]
            case ast.BoolOp():
                function = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return functools.reduce(function, (self._as_mask(self._value(each, values)) for each in node.values))
            case ast.UnaryOp():
                value = self._value(node.operand, values)
                if isinstance(node.op, ast.Not):
                    return ~self._as_mask(value)
                return -self._number(value) if isinstance(node.op, ast.USub) else self._number(value)
            case ast.BinOp():
                left, right = (self._number(self._value(each, values)) for each in (node.left, node.right))
                return self._compute(_ARITHMETIC[type(node.op)], left, right)
            case ast.Compare():
                sides = [self._value(each, values) for each in (node.left, *node.comparators)]
                found = [self._compare(op, *pair) for op, *pair in zip(node.ops, sides, sides[1:], strict=False)]
                return functools.reduce(np.logical_and, found)
        raise AssertionError(node)

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, list) or any(not isinstance(each, str | int | float) for each in right):
                raise self._error("`in` needs a list of numbers or texts, as in `cls in [1, 2]`")
            if isinstance(left, TextColumn) and all(isinstance(each, str) for each in right):
                found = left.isin(right)
            else:
                number = self._number(left)
                found = functools.reduce(
                    np.logical_or, (number == self._number(each) for each in right), np.zeros(np.shape(number), bool)
                )
            return found if isinstance(op, ast.In) else ~found
        if isinstance(right, TextColumn):
            left, right = right, left
        if isinstance(left, TextColumn):
            if not isinstance(right, str) or not isinstance(op, ast.Eq | ast.NotEq):
                raise self._error("a column of text can be compared with a text, by ==, != and in")
            return _COMPARISONS[type(op)](left, right)
        return _COMPARISONS[type(op)](self._number(left), self._number(right))

    def _compute(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        result = function(left, right)
        if function in (np.floor_divide, np.mod) and np.result_type(result).kind == "i" and np.any(np.equal(right, 0)):
            raise self._error("a division of whole numbers by 0")
        if np.result_type(result).kind == "i" and function in (operator.add, operator.sub, operator.mul):
            size = np.abs(function(np.float64(left), np.float64(right)))
            if np.any(size >= _EDGE):
                raise self._error("a number has more than 64 bits")
        return result

    def _number(self, value: Any) -> Any:
        if isinstance(value, TextColumn | str | list) or value is None:
            what = "a column of text" if isinstance(value, TextColumn) else _shown(value)
            raise self._error(f"{what} is not a number")
        if isinstance(value, bool) or (isinstance(value, np.ndarray | np.bool_) and value.dtype == np.bool_):
            return np.asarray(value, dtype=np.int64)
        return value

    def _as_mask(self, value: Any) -> Any:
        if isinstance(value, bool):
            return np.bool_(value)
        if isinstance(value, np.ndarray | np.bool_) and value.dtype == np.bool_:
            return value
        what = "text" if isinstance(value, TextColumn | str) else "a number"
        raise self._error(f"{what} is neither true nor false; compare it, as in `width > 0`")

    def _error(self, problem: str) -> SelectionError:
        return _error(self.text, problem)


def _load(column: Column, data: NDArray[Any]) -> Any:
    """Return the values of samples for the condition: a `TextColumn`, or an array of bool, int64 or float64. `data` are
    the stored numbers of `column`.
    """
    if column.values is not None:
        return TextColumn(data, column.values)
    return data.astype(np.int64) if data.dtype.kind in "iu" else data


def _problem(node: ast.AST) -> str:
    """Return why a condition cannot have a node, for a message; "" if it can."""
    if isinstance(node, ast.Constant):
        is_known = type(node.value) in (str, float, bool) or (type(node.value) is int and abs(node.value) < _EDGE)
        return "" if is_known else f"it holds {node.value!r}; it can hold text, numbers, True and False"
    if isinstance(node, ast.Attribute) and _dotted(node) is None:
        return f"{node.attr!r} belongs to no column"
    return "" if isinstance(node, _NODES) else f"{type(node).__name__} is not supported"


def _dotted(node: Any) -> str | None:
    """Return the name of the column that a node stands for, such as `json.score`; None for other nodes."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        node, names = node.value, [node.attr, *names]
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else None


def _names(node: ast.AST) -> Sequence[str]:
    """Return the names of all columns in an expression, in order and with repetitions."""
    name = _dotted(node)
    return [name] if name is not None else [name for each in ast.iter_child_nodes(node) for name in _names(each)]


def _parse(text: str) -> ast.expr:
    """Return the syntax tree of a condition.

    Raises:
        SelectionError: The text is not an expression, is too long or nested too deeply, or has a node that is not
            allowed. The message gives the position in the text, if known.
    """
    text = text.strip()
    if len(text) > _MAX_CHARS:
        raise _error(text, f"it has {len(text)} characters, more than the {_MAX_CHARS} allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a SyntaxWarning for an unknown escape in a text
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        at = err.offset if isinstance(err, SyntaxError) else None
        why = err.msg if isinstance(err, SyntaxError) else str(err) or type(err).__name__
        if found := _KEYWORD.search(text):
            way = f"`wdskit index FOLDER --columns NAME={found[0]}` gives the column another name"
            why += f"; {found[1]!r} is a keyword. {way}"
        raise _error(text, f"it cannot be read: {why}", at) from err
    pending: list[tuple[ast.AST, int]] = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        problem = "it is nested too deeply" if depth > _MAX_DEPTH else _problem(node)
        if problem:
            before = text.encode(errors="replace")[: getattr(node, "col_offset", 0)]  # `ast` counts bytes
            raise _error(text, problem, len(before.decode(errors="replace")) + 1)
        pending += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return tree


def _error(text: str, problem: str, position: int | None = None) -> SelectionError:
    """Return the error of a condition. `position` counts characters from 1; None if unknown."""
    at = f" at {position}" if position else ""
    return SelectionError(f"where{at}: {_shown(text)}: {problem}.")


def _shown(value: object) -> str:
    """Return the first 80 characters of a value's repr, for messages; `...` follows if the repr is longer."""
    shown = repr(value[:200] if isinstance(value, str | list | tuple) else value)
    return f"{shown[:80]}..." if len(shown) > 80 else shown
