"""The measured process: the agent as `trainwarden collect` runs it, but for network drivers that answer what was recorded.

python -m benchmarks.collector.node CONFIG
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.collector.drivers import RecordedDriver
from collectors import agent
from collectors.base import Source
from collectors.sources.ethtool import EthtoolSource
from trainwarden.config import load

Build = Callable[..., list[Source]]


def with_recorded_drivers(build: Build) -> Build:
    """Sources as built by `build`; where the tree is not the machine's own, no kernel can be asked for its drivers."""

    def built(*given: Any) -> list[Source]:
        sources = build(*given)
        for source in sources:
            if isinstance(source, EthtoolSource) and source.ask is None:
                source.ask = RecordedDriver()
        return sources

    return built


def main() -> None:
    """Run until SIGTERM."""
    agent.build_sources = with_recorded_drivers(agent.build_sources)
    agent.run(load(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
