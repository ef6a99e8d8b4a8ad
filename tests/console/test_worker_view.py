"""The worker as the console sees it: in time, late, standing by, or not there."""

from __future__ import annotations

from pathlib import Path

from actions.console.page import render_live
from actions.console.text import render_text
from actions.console.worker_view import look_at_worker, part_of
from tests.console.make_console import Sources
from trainwarden.embedded.ports import free_port
from trainwarden.selfmetrics import Metrics, serve


def metrics(age_s: float) -> Metrics:
    """A leading worker's own metrics."""
    made = Metrics("worker")
    made.set("tw_tick_age_seconds", age_s)
    made.set("tw_lag_records", 7, topic="tw.ticks")
    made.set("tw_lag_records", 5, topic="tw.steps")
    made.count("tw_dead_letters_total", 2, topic="tw.logs")
    for delay_ms in (450, 550, 900):
        made.observe_spread_ms("tw_tick_delay_ms", delay_ms)
    return made


def test_a_page_becomes_one_sentence() -> None:
    part = part_of(metrics(1.25).page(), 15.0)
    assert part.ok
    assert part.detail.startswith(
        "newest tick looked at 1.2 s ago, 12 records unread, 2 refused, 95% of ticks judged within"
    )


def test_who_warms_up_is_named() -> None:
    made = metrics(1.0)
    made.set("tw_judged_ratio", 0.12, detector="dynamic_threshold", part="gpu")
    made.set("tw_judged_ratio", 0.97, detector="mesh_links", part="pairs")
    assert part_of(made.page(), 15.0).detail.endswith("warming up: dynamic_threshold (gpu 12%)")


def test_a_late_worker_and_one_that_stands_by_are_told_apart() -> None:
    late = part_of(metrics(40.0).page(), 15.0)
    assert (late.ok, late.trouble) == (False, "is late")
    assert part_of(Metrics("worker").page(), 15.0).ok


def test_a_real_page_is_read_and_its_absence_is_said() -> None:
    port = free_port()
    server = serve(metrics(1.0), "127.0.0.1", port)
    try:
        assert "12 records unread" in look_at_worker(f"127.0.0.1:{port}", 15.0, timeout_s=30.0).detail
    finally:
        server.shutdown()
        server.server_close()
    gone = look_at_worker(f"127.0.0.1:{port}", 15.0)
    assert not gone.ok
    assert "streams.web_listen" in gone.detail
    assert look_at_worker("", 15.0).ok


def test_status_and_page_show_it(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    sources.worker = part_of(metrics(40.0).page(), 15.0)
    status = sources.console.status()
    assert "worker is late: newest tick looked at 40.0 s ago" in render_text(status)
    assert "worker is late" in render_live(status)
    assert "<footer>" in render_live(status)
