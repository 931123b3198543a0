"""Gives a text or YAML value the type that a config field's annotation asks for.

A flag is always text; YAML 1.1 reads `3e-4` as text, too. So every value is tried against the
alternatives of the annotation, most specific first, and a value that fits none is an error.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from dppo.cli.fields import Field
from dppo.errors import ConfigurationError

_TRUE, _FALSE = {"true", "yes", "on"}, {"false", "no", "off"}
_ORDER = ("bool", "int", "float", "Literal", "dict", "list", "str")


class _DoesNotFitError(Exception):
    """A value is not of one alternative type."""


def alternatives(annotation: str) -> tuple[list[str], bool]:
    """Splits an annotation into its alternative types.

    Args:
        annotation: As written in the class, such as `"float | None"`.

    Returns:
        The alternatives without None, most specific first, and whether None is one.

    Example:
        >>> alternatives("dict[str, Any] | str | None")
        (['dict[str, Any]', 'str'], True)
    """
    parts = [ast.unparse(part) for part in _union(ast.parse(annotation, mode="eval").body)]
    types = [part for part in parts if part != "None"]
    return sorted(types, key=_rank), "None" in parts


def convert(field: Field, value: Any) -> Any:
    """Gives `value` the type of `field`.

    Args:
        field: The option.
        value: Text from a flag, or what YAML made of it.

    Returns:
        The typed value.

    Raises:
        ConfigurationError: If it fits no alternative; names the key, value and expected type.
    """
    types, optional = alternatives(field.annotation)
    if value is None:
        if optional:
            return None
        raise ConfigurationError(_message(field, value))
    is_none_word = isinstance(value, str) and value.lower() in {"none", "null"}
    if optional and is_none_word and "str" not in types:
        return None
    if "str" in types and isinstance(value, str) and not value.lstrip().startswith("["):
        types = [kind for kind in types if _family(kind) != "list"]
    for kind in types:
        try:
            return _READERS.get(_family(kind), _refused)(value, kind)
        except _DoesNotFitError:
            continue
    raise ConfigurationError(_message(field, value))


def takes_flag_alone(field: Field) -> bool:
    """Whether `--name` without a value means true."""
    return "bool" in alternatives(field.annotation)[0]


def takes_several(field: Field) -> bool:
    """Whether `--name a b c` is a list."""
    return any(_family(kind) == "list" for kind in alternatives(field.annotation)[0])


def _message(field: Field, value: Any) -> str:
    return f"{field.name}: expected {field.annotation}, got {value!r} ({type(value).__name__})"


def _union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(node.left) + _union(node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Optional"):
        return [*_union(node.slice), ast.Constant(None)]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Union"):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return [inner for part in parts for inner in _union(part)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _union(ast.parse(node.value, mode="eval").body)
    return [node]


def _family(kind: str) -> str:
    return kind.partition("[")[0].rpartition(".")[2]


def _rank(kind: str) -> int:
    family = _family(kind)
    return _ORDER.index(family) if family in _ORDER else len(_ORDER)


def _as_bool(value: Any, _kind: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _DoesNotFitError


def _as_int(value: Any, _kind: str) -> int:
    return int(_number(value, int))


def _as_float(value: Any, _kind: str) -> float:
    return float(_number(value, float))


def _number(value: Any, kind: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _DoesNotFitError
    if kind is int and isinstance(value, float):
        raise _DoesNotFitError
    try:
        return kind(value)
    except ValueError:
        raise _DoesNotFitError from None


def _as_choice(value: Any, kind: str) -> Any:
    choices = ast.literal_eval(f"[{kind.partition('[')[2][:-1]}]")
    for choice in choices:
        same = type(choice) is type(value) and choice == value
        if same or (isinstance(value, str) and value.lower() == str(choice).lower()):
            return choice
    raise _DoesNotFitError


def _as_dict(value: Any, _kind: str) -> dict[str, Any]:
    loaded = _json(value, "{")
    if isinstance(loaded, dict):
        return loaded
    raise _DoesNotFitError


def _as_list(value: Any, kind: str) -> list[Any]:
    loaded = _json(value, "[")
    if isinstance(loaded, str):
        loaded = [part.strip() for part in loaded.split(",")]
    if not isinstance(loaded, list):
        raise _DoesNotFitError
    inner = kind.partition("[")[2][:-1] or "str"
    read = _READERS.get(_family(inner), _as_text)
    return [read(part, inner) for part in loaded]


def _json(value: Any, opening: str) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise _DoesNotFitError from None


def _refused(_value: Any, _kind: str) -> Any:
    """For classes that have no textual form, such as ParallelismConfig."""
    raise _DoesNotFitError


def _as_text(value: Any, _kind: str) -> str:
    if isinstance(value, str):
        return value
    raise _DoesNotFitError


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "bool": _as_bool,
    "int": _as_int,
    "float": _as_float,
    "Literal": _as_choice,
    "dict": _as_dict,
    "list": _as_list,
    "str": _as_text,
}
