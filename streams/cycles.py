"""How often Python looks for garbage in cycles. Whoever reads thousands of records a second makes next to none, and pays for each look."""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 50_000, 20, 50
"""New containers before a look at them, and looks at the younger before one at the older. With Python's own 700 it looked 36 times a second
at 1,250 nodes, took each tick that was still waited for as one that stays, and so walked through all that it knows every ten seconds."""


def collect_rarely() -> None:
    """Look for cycles every second or two, and through everything every half hour or so; what is in no cycle is freed at once as ever."""
    gc.set_threshold(YOUNG, MIDDLE, OLD)
