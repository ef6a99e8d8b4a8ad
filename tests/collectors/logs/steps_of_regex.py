"""What makes an expression run away, found in its syntax tree."""

from __future__ import annotations

import re._constants as constants  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)
MANY = 32


def nested_quantifiers(regex: str) -> bool:
    """Whether a repetition of unbounded length stands within another one: the number of ways to match a line is exponential then."""
    return _nested(parser.parse(regex), inside=False)


def wide_repeats(regex: str) -> int:
    """The most unbounded repetitions one after the other on a way through the expression: the degree of the worst case, plus the start."""
    return _count(parser.parse(regex))


def _nested(tree: Any, inside: bool) -> bool:
    for operation, argument in tree:
        if operation in REPEATS:
            low, high, body = argument
            wide = high > MANY or high == constants.MAXREPEAT
            if (wide and inside) or _nested(body, inside or high > 1):
                return True
            del low
        elif any(_nested(body, inside) for body in _bodies(operation, argument)):
            return True
    return False


def _count(tree: Any) -> int:
    total = 0
    for operation, argument in tree:
        if operation in REPEATS:
            total += 1 if argument[1] == constants.MAXREPEAT else max(0, _count(argument[2]))
        else:
            total += max((_count(body) for body in _bodies(operation, argument)), default=0)
    return total


def _bodies(operation: Any, argument: Any) -> list[Any]:
    if operation is constants.SUBPATTERN:
        return [argument[3]]
    if operation is constants.BRANCH:
        return list(argument[1])
    if operation in (constants.ASSERT, constants.ASSERT_NOT):
        return [argument[1]]
    if operation is constants.GROUPREF_EXISTS:
        return [body for body in argument[1:] if body is not None]
    return []
