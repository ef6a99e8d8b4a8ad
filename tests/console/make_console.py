"""A console whose sources are in the test's hands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from actions.console.model import Part
from actions.console.status import Console
from actions.console.store_view import StoreView
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.errors import UnavailableError

NOW_S = 1_764_400_000


class FakeClient:
    """Answers the store's questions from a table; `away` makes it refuse."""

    def __init__(self, nodes: list[Any] | None = None, ranks: list[Any] | None = None) -> None:
        self.nodes = nodes or []
        self.ranks = ranks or []
        self.asked = 0

    def query(self, text: str) -> Any:
        """Rows for a question."""
        self.asked += 1
        rows = self.nodes if "FROM host_ticks" in text else self.ranks if "FROM steps" in text else []
        return type("Result", (), {"result_rows": rows})()

    def close(self) -> None:
        """Nothing to close."""


def ago(seconds: float) -> datetime:
    """A moment before the simulated now."""
    return datetime.fromtimestamp(NOW_S - seconds, UTC)


def warden(node: str, **changes: Any) -> dict[str, Any]:
    """A node as the action service's API gives it."""
    return {"node": node, "reachable": True, "job": "llm", "state": "running", "generation": 1, "members": [], "last_steps": {}, "fence": 1,
            "excluded": False, "reason": "", **changes}  # fmt: skip


def incident(incident_id: str = "i0", node: str = "n1", **changes: Any) -> dict[str, Any]:
    """An incident as the action service's API gives it."""
    moments = ("fault", "first_signal", "verdict", "decided", "acted", "recovered", "closed")
    timeline = {f"{name}_at_ns": (NOW_S - 60 + i) * NS_PER_S if i < 3 else 0 for i, name in enumerate(moments)}
    return {
        "incident_id": incident_id, "revision": 1, "status": "open", "severity": "critical", "kind": "rank_frozen", "job": "llm",
        "title": f"llm stands: rank 1 on {node} is frozen", "culprits": [{"kind": "node", "name": node, "node": node}], "confidence": 0.9,
        "victims": ["rank:0"],
        "causes": [{"kind": "rank_frozen", "entity": {"kind": "node", "name": node, "node": node}, "probability": 0.9}],
        "remedy": ["restart"], "report": "It stopped.", "last_step": 41, "timeline": timeline, "observed_at_ns": NOW_S * NS_PER_S,
        "evidence": [evidence([1.0, float("nan"), 0.0])], "close_reason": "", **changes,
    }  # fmt: skip


def evidence(values: list[float], **changes: Any) -> dict[str, Any]:
    """A series as the action service's API gives it."""
    return {
        "name": "cpu_cores",
        "unit": "cores",
        "values": values,
        "low": 0.5,
        "high": float("nan"),
        "note": "x",
        **changes,
    }


class Sources:
    """What the console sees."""

    def __init__(self, directory: Path) -> None:
        self.clock = SimulatedClock(NOW_S * NS_PER_S)
        self.client = FakeClient()
        self.store_error: Exception | None = None
        self.service_error = ""
        self.broker_error = ""
        self.worker = Part("worker", True, "newest tick looked at 0.4 s ago")
        self.answers: dict[str, Any] = {
            "/v1/health": {"state": "leading", "mode": "auto", "kill_switch": ""},
            "/v1/nodes": [],
            "/v1/incidents": [],
            "/v1/plans": [],
        }
        self.config = from_table({"cluster": "c", "run_dir": str(directory), "actions": {"listen": "127.0.0.1:1"}})
        self.console = Console(
            self.config,
            self.clock,
            self._fetch,
            StoreView("clickhouse://x", self.clock, self._open),
            self._probe,
            lambda listen, late_s: self.worker,
        )

    def _open(self, url: str) -> FakeClient:
        del url
        if self.store_error is not None:
            raise self.store_error
        return self.client

    def _fetch(self, path: str) -> Any:
        if self.service_error:
            raise UnavailableError(self.service_error)
        return self.answers[path.partition("?")[0]]

    def _probe(self, url: str) -> str:
        del url
        return self.broker_error


Change = Callable[[Sources], None]
