"""Damages captures and feeds them to parsers: each answers, or refuses with the errors that it names. Nothing else, ever.

Used by the tests and by `python -m benchmarks.collector_fuzz`. A case is named by seed, parser and number, so that it can be made again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.collectors.kit import FIXTURES
from tests.collectors.parsers import PARSERS

SEED_BYTES = 4000
JUNK = (
    b"", b"\0", b"\xff\xfe", b" ", b"\n", b"\r", b"\t", b":", b"=", b"-1", b"nan", b"inf", b"-inf", b"1e309", b"9" * 40, b"0x", b"\\777",
    "\u0663".encode(), "\u2028".encode(), b"[" * 60, b"{" * 60, b"(((", b"\"", b"'", b"%s", b"a" * 3000, b"\x1b[31m", b"[1-99999999]",
    b"<0>", b"null", b"true", b"{}", b"[]", b"\x80\x04", b".",
)  # fmt: skip


def seed_of(seed: str | bytes) -> bytes:
    """A capture's beginning."""
    return seed if isinstance(seed, bytes) else (FIXTURES / seed).read_bytes()[:SEED_BYTES]


def damaged(seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    """A capture with one to four damages of different kinds."""
    data = dice.choice(seeds)
    for _ in range(dice.randrange(1, 5)):
        data = dice.choice(KINDS)(data, seeds, dice)[: 2 * SEED_BYTES]
    return data


def cut(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    return data[: dice.randrange(len(data) + 1)]


def without(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at = dice.randrange(len(data) + 1)
    return data[:at] + data[at + dice.randrange(1, 40) :]


def stuffed(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(JUNK) + data[at:]


def overwritten(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    at, junk = dice.randrange(len(data) + 1), dice.choice(JUNK)
    return data[:at] + junk + data[at + len(junk) :]


def flipped(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    changed = bytearray(data)
    for _ in range(min(len(changed), dice.randrange(1, 8))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def spliced(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    other = dice.choice(seeds)
    return data[: dice.randrange(len(data) + 1)] + other[dice.randrange(len(other) + 1) :]


def shuffled(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del seeds
    lines = data.split(b"\n")
    dice.shuffle(lines)
    return b"\n".join(lines + lines[:3])


def noise(data: bytes, seeds: tuple[bytes, ...], dice: random.Random) -> bytes:
    del data, seeds
    return dice.randbytes(dice.randrange(300))


KINDS = (cut, without, stuffed, overwritten, flipped, spliced, shuffled, noise)


def cases(name: str, count: int, seed: str = "") -> Iterator[bytes]:
    """Damaged captures of a parser, `count` of them after those that everybody forgets."""
    seeds = tuple(seed_of(seed) for seed in PARSERS[name].seeds)
    yield from (b"", b"\n", b"\0" * 100, b"\xff" * 100, b" " * 5000, b"9" * 5000, b"[" * 5000, *seeds)
    for number in range(count):
        yield damaged(seeds, random.Random(f"{seed}{name}/{number}"))


def failures(name: str, count: int, seed: str = "") -> Iterator[str]:
    """Feed a parser; a sentence for each case that it neither answers nor refuses as it should."""
    parser = PARSERS[name]
    for number, data in enumerate(cases(name, count, seed)):
        try:
            parser.parse(data)
        except parser.refuses:
            continue
        except Exception as error:
            yield f"{name}, case {number}: {error!r}; {len(data)} bytes: {data[:300]!r}"
