"""Pages in Prometheus and OpenMetrics text: what is read, what is left out, what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.pages.text import MAX_PAGE_BYTES, Page, PageError, Reader, parse_labels

GOOD = b"""# HELP power the power, in "W" \\ each
# TYPE power gauge
power{gpu="0",note="a \\"b\\" \\\\ c\\nd, e} {"} 250.5 1606402000123
power{gpu="1",} 3e2
power{gpu="2"}\t-Inf
other{gpu="0"} nonsense that nobody asked for
# a remark
# EOFX
temp 41
temp{ gpu = "0" , x="y" } NaN 5
"""


def read(body: bytes, *wanted: str) -> Page:
    return Reader(frozenset(wanted or ("power", "temp"))).read(body)


def test_a_page_with_all_that_the_format_allows() -> None:
    page = read(GOOD)
    assert (page.fault_count, page.truncated) == (0, False)
    assert (page.kind("power"), page.help("power")) == ("gauge", 'the power, in "W" \\ each')
    first, second, third = page.points["power"]
    assert first == ({"gpu": "0", "note": 'a "b" \\ c\nd, e} {'}, 250.5, 1606402000123)
    assert (second.value, second.at_ms, third.value) == (300.0, None, -math.inf)
    assert page.points["temp"][0].labels == {}
    assert math.isnan(page.points["temp"][1].value)
    assert page.points["temp"][1].labels == {"gpu": "0", "x": "y"}
    assert "other" not in page.points


def test_openmetrics_counts_seconds_and_names_counters_without_their_ending() -> None:
    page = read(b'# TYPE n counter\nn_total 5 1606402000.5 # {id="q"} 1 2\nn_total{a="b"} 2 # {} 1\n# EOF', "n_total")
    assert [point.value for point in page.points["n_total"]] == [5.0, 2.0]
    assert page.points["n_total"][0].at_ms == 1606402000500
    assert page.kind("n_total") == "counter"
    assert not page.truncated


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"power 1_000", "no number"), ("power １".encode(), "no number"), (b"power", "no sample"), (b"power ", "no sample"),
        (b'power{gpu="0"', "no sample"), (b'power{gpu="0} 1', "no sample"), (b'power{gpu=0} 1', "labels"),
        (b'power{gpu="0" x="1"} 1', "labels"), (b'power{0gpu="0"} 1', "labels"), (b'power{a="1",a="2"} 1', "twice"),
        (b'power{a="\\t"} 1', "escape"), (b'power{a="\xff"} 1', "UTF-8"), (b"power 1 2 3", "no sample"), (b"power 1 1.5", ""),
        (b"power 0x1", "no number"), (b"power 1\r\x0b2", "no number"), (b'power{gpu="0"}1', "no sample"),
    ],
)  # fmt: skip
def test_a_line_that_breaks_the_format_is_left_out_and_told(line: bytes, why: str) -> None:
    page = read(b'power{gpu="7"} 1\n' + line + b"\ntemp 2\n")
    assert page.fault_count == 1
    assert page.first_fault.startswith("line 2 ")
    assert why in page.first_fault
    assert [point.value for point in page.points["power"]] == [1.0]
    assert [point.value for point in page.points["temp"]] == [2.0]


def test_a_series_that_comes_twice_counts_once_whatever_the_order_of_its_labels() -> None:
    page = read(b'power{a="1",b="2"} 1\npower{b="2",a="1"} 9\npower{a="1"} 3\n')
    assert [point.value for point in page.points["power"]] == [1.0, 3.0]
    assert "repeats a series" in page.first_fault


def test_separators_of_other_scripts_do_not_end_a_line() -> None:
    page = read('power{pod="a\u2028b\x85c\x0bd"} 7\n'.encode())
    assert page.points["power"][0].labels == {"pod": "a\u2028b\x85c\x0bd"}


def test_the_end_of_a_cut_page_is_not_read() -> None:
    page = read(b"temp 41\npower 250")
    assert page.truncated
    assert "power" not in page.points  # it may have been 2500
    assert not read(b"temp 41\n").truncated


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"", "empty"), (b" \n\n", "empty"), (b"<html>503</html>\n", "not_metrics"), (b"\x1f\x8b\x08\0\0", "not_metrics"),
     ("power 1\n".encode("utf-16"), "not_metrics"), (b"#" * (MAX_PAGE_BYTES + 1), "too_large"),
     (b"power 1\n" * (50 * 1024 * 1024 // 8), "too_large")],
    ids=["empty", "blank", "html", "gzip", "utf16", "limit", "50MB"],
)  # fmt: skip
def test_what_is_no_page_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(PageError) as caught:
        read(body)
    assert caught.value.reason == reason


def test_a_byte_order_mark_is_no_part_of_the_first_name() -> None:
    assert read(b"\xef\xbb\xbfpower 1\n").points["power"][0].value == 1.0


def test_label_sets_are_kept_within_bounds() -> None:
    reader = Reader(frozenset(["power"]))
    for start in range(0, 30_000, 3000):
        lines = "".join(f'power{{pod="p{i}"}} 1\n' for i in range(start, start + 3000))
        assert len(reader.read(lines.encode()).points["power"]) == 3000
    assert len(reader._labels) <= 4096


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
def test_whatever_comes_is_read_or_refused(noise: bytes, start: int, end: int) -> None:
    low, high = sorted((start, end))
    reasons: set[str] = set()
    for body in (noise, GOOD[:low] + noise + GOOD[high:], GOOD[:high]):
        try:
            page = read(body)
        except PageError as error:
            reasons.add(error.reason)
            continue
        for points in page.points.values():
            for labels, value, at_ms in points:
                assert isinstance(value, float)
                assert at_ms is None or isinstance(at_ms, int)
                assert all(isinstance(k, str) and isinstance(v, str) for k, v in labels.items())
    assert reasons <= {"empty", "not_metrics"}


LABELS = st.dictionaries(
    st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(codec="utf-8"), max_size=12),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(LABELS, st.floats(allow_nan=False))
def test_what_is_written_by_the_format_is_read_as_it_was(labels: dict[str, str], value: float) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    assert parse_labels(inner) == labels
    page = read(f"power{{{inner}}} {value!r}\n".encode())
    assert page.points["power"] == ((labels, value, None),)
