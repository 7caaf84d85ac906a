"""Check that wdskit/ has no more lines of code than `max_code_lines` in pyproject.toml. `make lint` runs it.

    python tools/dev/check_size.py [FILE_OR_FOLDER]

Docstrings, comments and blank lines do not count. The number in pyproject.toml is only ever lowered: who adds lines
removes others. With a file or folder, its lines are printed for each file.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = re.compile(r"^max_code_lines = (\d+)", re.MULTILINE)
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Return the number of lines of Python code without docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main(arguments: list[str]) -> int:
    """Compare the number of lines with the limit, or print the numbers of files. Returns the exit code."""
    if arguments:
        place = Path(arguments[0])
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            print(f"{count_code_lines(path.read_text('utf-8')):6} {path}")
        return 0
    found = LIMIT.search((ROOT / "pyproject.toml").read_text("utf-8"))
    if found is None:
        print("pyproject.toml has no `max_code_lines` below [tool.wdskit].")
        return 1
    total = sum(count_code_lines(path.read_text("utf-8")) for path in (ROOT / "wdskit").rglob("*.py"))
    if total > int(found[1]):
        print(f"wdskit/ has {total:,} lines of code, and max_code_lines in pyproject.toml is {int(found[1]):,}.")
        print("Remove as many lines as you add: python tools/dev/check_size.py wdskit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
