"""NVML's events: Xids and their kin. They come at once, but without time, text or memory of what was: the kernel log has those."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from collectors.nvidia import abi
from collectors.nvidia.library import Library

WAIT_MS = 5000
PAUSE_S = 1.0
MOST = 256


class EventWatch:
    """A thread that waits for events, never for ever. Events beyond `MOST` not fetched are counted, not kept."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._generation = 0
        self.registered: frozenset[str] = frozenset()

    def register(self, gpus: Mapping[str, tuple[ctypes.c_void_p, str]]) -> None:
        """Watch these GPUs (name → handle, PCI address) from now on, in place of those before."""
        self._generation += 1
        event_set = ctypes.c_void_p()
        if self._library.call("EventSetCreate")(ctypes.byref(event_set)) != abi.SUCCESS:
            self.registered = frozenset()
            return
        self.registered = frozenset(name for name, (handle, _) in gpus.items() if self._register(handle, event_set))
        names = {handle.value or 0: (name, pci) for name, (handle, pci) in gpus.items()}
        if self.registered:
            threading.Thread(target=self._watch, args=(self._generation, event_set, names), daemon=True).start()

    def take(self) -> list[dict[str, Any]]:
        """What came since the last call."""
        if not self._events:
            return []
        with self._lock:
            found = list(self._events)
            self._events.clear()
            if self._dropped:
                found[-1]["dropped_before"] = str(self._dropped)
                self._dropped = 0
        return found

    def _register(self, handle: ctypes.c_void_p, event_set: ctypes.c_void_p) -> bool:
        supported = ctypes.c_ulonglong()
        if self._library.call("DeviceGetSupportedEventTypes")(handle, ctypes.byref(supported)) != abi.SUCCESS:
            return False
        wanted = supported.value & abi.EVENT_MASK
        return (
            bool(wanted & abi.EVENT_XID)
            and self._library.call("DeviceRegisterEvents")(handle, ctypes.c_ulonglong(wanted), event_set) == abi.SUCCESS
        )

    def _watch(self, generation: int, event_set: ctypes.c_void_p, names: Mapping[int, tuple[str, str]]) -> None:
        wait = self._library.newest("EventSetWait_v2", "EventSetWait")
        data = ctypes.create_string_buffer(abi.EVENT_DATA.size + 64)
        while generation == self._generation:
            code = wait(event_set, data, WAIT_MS)
            if code == abi.SUCCESS:
                self._take_in(names, *abi.EVENT_DATA.unpack_from(data))
            elif code != abi.TIMEOUT:
                time.sleep(PAUSE_S)  # a lost GPU makes the call come back at once, again and again
        self._library.call("EventSetFree")(event_set)

    def _take_in(
        self, names: Mapping[int, tuple[str, str]], device: int, kind: int, data: int, *instances: int
    ) -> None:
        name, pci = names.get(device or 0, ("", ""))
        facts: dict[str, Any] = {"gpu": name, "pci": pci, "at_ns": time.time_ns()}
        if kind & abi.EVENT_XID:
            facts.update(code=f"xid:{data}", xid=str(data))
        else:
            facts.update(code=abi.EVENTS.get(kind, "gpu_event"), kind=hex(kind), data=str(data))
        if instances and instances[0] != 0xFFFFFFFF:
            facts["instance"] = f"gi{instances[0]}"
        with self._lock:
            if len(self._events) >= MOST:
                self._dropped += 1
            else:
                self._events.append(facts)
