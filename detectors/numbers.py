"""Whole numbers out of text that came from outside."""

from __future__ import annotations

MOST_DIGITS = 18


def whole_number(text: str, otherwise: int) -> int:
    """The number that `text` is, else `otherwise`: superscripts and numbers beyond 64 bits are none.

    Examples
    --------
    >>> whole_number("-9", 0), whole_number("\\u00b2", -1), whole_number("9" * 5000, -1)
    (-9, -1, -1)
    """
    digits = text.removeprefix("-")
    plain = digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS
    return int(text) if plain else otherwise
