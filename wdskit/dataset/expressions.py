"""Parse an expression of a user, for `filter` and `where`: Python's syntax, limited in size and in kinds of nodes."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Callable

from wdskit.errors import SelectionError

MAX_CHARS = 2000
MAX_NODES = 400
MAX_DEPTH = 40

_ATTRIBUTE = re.compile(r"\.\s*(\w+)")


def parse_expression(text: str, problem_of: Callable[[ast.AST], str], *, what: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Args:
        text: The expression in Python's syntax.
        problem_of: Called with each node, except the names of called functions and methods. Returns why the node is not
            allowed, or "".
        what: `filter` or `where`, for messages.

    Raises:
        SelectionError: The text is not an expression, is too long or nested too deeply, has more than 400 nodes, or
            has a node that is not allowed. The message gives the position in the text, if known.
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        raise expression_error(what, text, f"it has {len(text)} characters, more than the {MAX_CHARS} allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a SyntaxWarning for an unknown escape in a text
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        at = err.offset if isinstance(err, SyntaxError) else None
        why = err.msg if isinstance(err, SyntaxError) else str(err) or type(err).__name__
        word = next((word for word in _ATTRIBUTE.findall(text) if keyword.iskeyword(word)), None)
        if word and what == "where":
            way = f"`wdskit index FOLDER --columns NAME=json.{word}` gives the column another name"
            why += f"; {word!r} is a keyword. {way}"
        elif word:
            why += f"; {word!r} is a keyword, so write [{word!r}] in place of .{word}"
        raise expression_error(what, text, f"it cannot be read: {why}", at) from err
    pending: list[tuple[ast.AST, int]] = [(tree, 1)]
    num_nodes = 0
    while pending:
        node, depth = pending.pop()
        num_nodes += 1
        problem = "it is nested too deeply" if depth > MAX_DEPTH else problem_of(node)
        if num_nodes > MAX_NODES:
            problem = f"it has more than {MAX_NODES} parts"
        if problem:
            before = text.encode(errors="replace")[: getattr(node, "col_offset", 0)]  # `ast` counts bytes
            raise expression_error(what, text, problem, len(before.decode(errors="replace")) + 1)
        pending += [(child, depth + 1) for child in children_of(node)]
    return tree


def children_of(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes of a node. For a call, return its positional arguments, and then, if it calls a method,
    the object before the dot. The name of the called function or method is left out.
    """
    if isinstance(node, ast.Call):
        return [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    return list(ast.iter_child_nodes(node))


def expression_error(what: str, text: str, problem: str, position: int | None = None) -> SelectionError:
    """Return the SelectionError for the expression `text`. `what` is its setting, `filter` or `where`. `position`
    counts characters from 1; None if unknown.
    """
    at = f" at {position}" if position else ""
    return SelectionError(f"{what}{at}: {short_repr(text)}: {problem}.")


def short_repr(value: object) -> str:
    """Return the first 80 characters of a value's repr, for messages; `...` follows if the repr is longer."""
    shown = repr(value[:200] if isinstance(value, str | list | tuple) else value)
    return f"{shown[:80]}..." if len(shown) > 80 else shown
