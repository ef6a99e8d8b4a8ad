"""What holds for every collector test: no source gives a gap whose reason is not in the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collectors.base import Sample, registry
from collectors.reasons import meaning


@pytest.fixture(autouse=True)
def known_reasons(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look at the gaps of every sample that is made during the test, in whatever thread."""
    unknown: set[str] = set()
    sources = {*registry().all(), "agent", "spool"}
    build = Sample.__init__

    def checked(sample: Sample, *given: Any, **named: Any) -> None:
        build(sample, *given, **named)
        unknown.update(f"{g.source}: {g.reason}" for g in sample.gaps if g.source in sources and not meaning(g.reason))

    monkeypatch.setattr(Sample, "__init__", checked)
    yield
    assert not unknown, f"gaps for reasons that collectors/reasons.py does not know: {sorted(unknown)}"
