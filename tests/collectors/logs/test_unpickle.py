"""Pickles are read as plain data or not at all."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.logs.unpickle import PickleError, load

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=PLAIN, protocol=st.sampled_from([2, 4, 5]))
def test_plain_data_comes_back(value: object, protocol: int) -> None:
    dumped = pickle.dumps(value, protocol=protocol)
    if any(op.name in ("GLOBAL", "STACK_GLOBAL") for op, _, _ in pickletools.genops(dumped)):
        return  # protocol 2 has no bytes: it calls a function for them
    assert load(dumped) == value


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/should-not-exist",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_is_refused_and_not_run(protocol: int) -> None:
    with pytest.raises(PickleError, match="only plain data"):
        load(pickle.dumps({"entries": [Evil()]}, protocol=protocol))
    assert not os.path.exists("/tmp/should-not-exist")


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (pickle.dumps(collections.OrderedDict(a=1)), "only plain data"),
        (b"", "in the middle"),
        (b"\x80\x02.", "nothing on the stack"),
        (b"\x80\x02e.", "no mark"),
        (b"\x80\x02]K\x01s.", "on the stack|expected"),
        (b"\x80\x02h\x07.", "KeyError"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f", "a number of 2147483647 bytes"),
        (b"\x80\x02X\xff\xff\xff\xff", "in the middle"),
        (b"\x80\x02\x8d" + b"\xff" * 8, "in the middle"),
        (b"\x80\x02}(]K\x01u.", "key of type list"),
        (b"\x80\x02Nr\xff\xff\xff\xff\x81.", "only plain data"),
        (b"\x80\x02\x82\x01.", "only plain data"),
        (b"\x80\x02U\x01a.", "only plain data"),
    ],
)
def test_what_is_broken_or_greedy_is_one_sentence(payload: bytes, sentence: str) -> None:
    with pytest.raises(PickleError, match=sentence):
        load(payload)


@settings(max_examples=120, deadline=None)
@given(rubbish=st.binary(max_size=200), start=st.sampled_from([b"", b"\x80\x02", b"\x80\x02}(", b"\x80\x04]("]))
def test_rubbish_is_an_error_of_ours_or_a_value(rubbish: bytes, start: bytes) -> None:
    with contextlib.suppress(PickleError):
        load(start + rubbish)


def test_references_that_explode_when_walked_cost_nothing_here() -> None:
    value: object = "x"
    for _ in range(200):
        value = [value, value]
    assert isinstance(load(pickle.dumps(value)), list)
