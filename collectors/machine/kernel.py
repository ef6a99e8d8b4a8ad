"""Numbers that the kernel keeps about itself: memory stalls, network backlog, interrupts, open files. Pure functions on text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from collectors.files import to_number

CLOCK_SOURCES = (
    "",
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
    "xen",
    "acpi_pm",
    "hpet",
    "jiffies",
)
ERROR_INTERRUPTS = {"MCE": "machine_checks", "THR": "threshold_interrupts", "TRM": "thermal_interrupts"}


def vmstat(text: str) -> dict[str, float]:
    """``name value`` lines; counts of one thing by zone (``allocstall_normal``) are also summed under the bare name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = to_number(value)
        if number is None:
            continue
        found[name] = number
        bare = name.partition("_")[0]
        if bare == "allocstall" and name != bare:
            found[bare] = found.get(bare, 0.0) + number
    return found


def softnet(text: str) -> tuple[float, float] | None:
    """Packets dropped and times the budget ran out, over all processors; None without a line. Hexadecimal, columns by kernel version."""
    dropped, squeezed, lines = 0, 0, 0
    for words in map(str.split, text.splitlines()):
        try:
            dropped, squeezed = dropped + int(words[1][:16], 16), squeezed + int(words[2][:16], 16)
        except (ValueError, IndexError):
            continue
        lines += 1
    return (float(dropped), float(squeezed)) if lines else None


def file_handles(text: str) -> tuple[float, float] | None:
    """Open file handles and their limit, from /proc/sys/fs/file-nr."""
    numbers = [to_number(word) for word in text.split()]
    if len(numbers) != 3 or numbers[0] is None or numbers[1] is None or numbers[2] is None:
        return None
    return numbers[0] - numbers[1], numbers[2]


def error_interrupts(text: str) -> dict[str, float]:
    """Machine checks, thresholds and thermal events from /proc/interrupts, over all processors; absent rows are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        key = ERROR_INTERRUPTS.get(name.strip()) if colon else None
        if key is not None:
            found[key] = float(
                sum(int(word) for word in rest.split() if word.isascii() and word.isdigit() and len(word) < 20)
            )
    return found


def stat_numbers(text: str) -> dict[str, float]:
    """Interrupts so far and tasks that wait for a disk, from /proc/stat."""
    wanted = {"intr": "interrupts", "procs_blocked": "blocked_tasks", "softirq": "soft_interrupts"}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        number = to_number(rest.partition(" ")[0]) if name in wanted else None
        if number is not None:
            found[wanted[name]] = number
    return found


def clock_source_number(name: str) -> float | None:
    """1 tsc, 2 kvm-clock, ... 8 jiffies; 0 another one; None for no name."""
    if not name:
        return None
    return float(CLOCK_SOURCES.index(name)) if name in CLOCK_SOURCES else 0.0


def sum_of(values: Iterable[float | None]) -> float | None:
    """Sum of those that are there; None when none is."""
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part` of `whole`; None without either, or of nothing."""
    return None if part is None or not whole else part / whole


def present(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are there."""
    return {name: value for name, value in values.items() if value is not None}
