"""Turning TOML tables into frozen dataclasses, with errors that name the key, what was found and the nearest right name.

Field names carry the unit: ``*_ms`` and ``*_s`` accept ``"250ms"``, ``"2s"``, ``"5m"``, ``"1h"`` or a bare number in that unit;
``*_bytes`` accept ``"64MiB"``, ``"2GB"`` or a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainwarden.errors import ConfigError

T = TypeVar("T")

_DURATION_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3, "h": 3600e3, "d": 86400e3}
_SIZE = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and the sentence that documentation shows."""
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def parse_settings(settings: type[T], table: Mapping[str, Any], path: str) -> T:
    """An instance of the dataclass `settings` from `table`.

    Parameters
    ----------
    path
        Dotted name of the table, for messages (``detectors.straggler``).

    Raises
    ------
    ConfigError
        Unknown key (with the nearest known one), wrong type, unreadable duration or size, missing value without default.
    """
    hints = typing.get_type_hints(settings)
    known = {f.name: f for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ConfigError(unknown_key(path, key, list(known)))
    values = {key: _convert(hints[key], value, _join(path, key)) for key, value in table.items()}
    for key, item in known.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ConfigError(f"{_join(path, key)} is missing: it has no default")
    return settings(**values)


def unknown_key(path: str, key: str, known: list[str]) -> str:
    """The sentence for a key that does not exist."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known) or 'none'}"
    return f"{_join(path, key)}: unknown key, {hint}"


def parse_duration_ms(value: object, path: str, bare_unit: str) -> float:
    """Milliseconds in ``"2s"`` or a number in `bare_unit`.

    Examples
    --------
    >>> parse_duration_ms("5m", "x_s", "s")
    300000.0
    """
    return _quantity(value, path, _DURATION_MS, bare_unit, "a duration such as 250ms, 2s, 5m or 1h")


def parse_size_bytes(value: object, path: str) -> int:
    """Bytes in ``"64MiB"`` or a number.

    Examples
    --------
    >>> parse_size_bytes("64MiB", "spool_bytes")
    67108864
    """
    return int(_quantity(value, path, _SIZE, "", "a size such as 64MiB or 2GB"))


def _quantity(value: object, path: str, units: Mapping[str, float], bare_unit: str, expected: str) -> float:
    match = (
        _QUANTITY.fullmatch(str(value))
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else None
    )
    unit = (match.group(2) or bare_unit) if match else None
    factor = units.get(unit, units.get(unit.lower())) if unit is not None else None
    if match is None or factor is None:
        raise ConfigError(f"{path}: {value!r} is no value for it, expected {expected}")
    return float(match.group(1)) * factor


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return parse_settings(hint, _expect_table(value, path), path)  # type: ignore[arg-type]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return None if value is None else _convert(inner[0], value, path)
    if typing.get_origin(hint) in (dict, Mapping) or hint in (dict, Mapping):
        return _convert_table(hint, value, path)
    if typing.get_origin(hint) in (tuple, list):
        return _convert_sequence(hint, value, path)
    return _convert_scalar(hint, value, path)


def _convert_table(hint: Any, value: Any, path: str) -> dict[str, Any]:
    args = typing.get_args(hint)
    inner = args[1] if len(args) == 2 else Any
    return {key: _convert(inner, item, _join(path, key)) for key, item in _expect_table(value, path).items()}


def _convert_sequence(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path}: found {value!r}, expected a list")
    return tuple(_convert(typing.get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(hint, value, path)
    if hint in (int, float) and not isinstance(value, bool):
        return _convert_number(hint, value, path)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: found {value!r} ({type(value).__name__}), expected {getattr(hint, '__name__', hint)}")


def _convert_number(hint: type, value: Any, path: str) -> Any:
    number: float
    if path.endswith("_bytes"):
        number = parse_size_bytes(value, path)
    elif path.endswith("_ms"):
        number = parse_duration_ms(value, path, "ms")
    elif path.endswith("_s") and not path.endswith("_per_s"):
        number = parse_duration_ms(value, path, "s") / 1000
    elif isinstance(value, int | float):
        number = value
    else:
        raise ConfigError(f"{path}: found {value!r}, expected a number")
    if hint is int and (math.isinf(number) or number != int(number)):
        raise ConfigError(f"{path}: found {value!r}, expected a whole number")
    return hint(number)


def _convert_enum(hint: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    try:
        return hint(value)
    except ValueError:
        raise ConfigError(f"{path}: found {value!r}, expected one of {', '.join(str(m.value) for m in hint)}") from None


def _expect_table(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: found {value!r}, expected a table")
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def describe(settings: type[Any], path: str, emit: Callable[[str, str, str, str], None]) -> None:
    """Call `emit(key, type, default, help)` for each key under `path`; nested dataclasses are walked."""
    hints = typing.get_type_hints(settings)
    for item in dataclasses.fields(settings):
        key, hint = _join(path, item.name), hints[item.name]
        if dataclasses.is_dataclass(hint):
            describe(hint, key, emit)  # type: ignore[arg-type]
            continue
        emit(key, _type_name(hint), _default_text(item), str(item.metadata.get("help", "")))


def _type_name(hint: Any) -> str:
    """`hint` as a reader of the documentation would say it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _type_name(next(arm for arm in typing.get_args(hint) if arm is not type(None)))
    if typing.get_origin(hint) in (dict, Mapping):
        return f"table of {_type_name(typing.get_args(hint)[1])}"
    if typing.get_origin(hint) in (tuple, list):
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint)).lower()


def _default_text(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return "" if item.default is None else str(item.default)
    return str(item.default_factory()) if item.default_factory is not dataclasses.MISSING else "required"
