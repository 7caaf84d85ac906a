"""Functions as settings: a callable, or the name that one is registered under."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from wdskit.config.messages import show, wrong_kind
from wdskit.config.spec import refuse


def is_function_name(name: object) -> bool:
    """Whether a function may be registered as `name`."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _check_function(value: object) -> object:
    if isinstance(value, str):
        if not is_function_name(value):
            raise refuse(f"{show(value)} is no name that a function can be registered under (letters, digits, _).")
        return value
    if callable(value):
        return value
    raise refuse(wrong_kind(value, "the name of a registered function is needed"))


Function = Annotated[str | Callable[..., Any], PlainValidator(_check_function), WithJsonSchema({"type": "string"})]
