"""Which of a driver's hundreds of statistics matter, and what they are called here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from collectors.base import NAN, Row, highest
from collectors.network.counters import Deltas

PRIORITIES = 8
US_PER_S = 1e6


class Kind(Enum):
    """How values become a column: a rate, summed over all that match; a percentage of the last second; a rate of each index."""

    SUM = "sum"
    PERCENT = "percent"
    EACH = "each"


class Rule(NamedTuple):
    """Names of one thing. A group in `pattern` is the priority or lane."""

    column: str
    pattern: re.Pattern[str]
    kind: Kind = Kind.SUM


def _rule(column: str, pattern: str, kind: Kind = Kind.SUM) -> Rule:
    return Rule(column, re.compile(pattern), kind)


RULES: tuple[Rule, ...] = (
    # mlx5 | bnxt_en | ice, i40e | ionic | ena
    _rule("fec_corrected_per_s", r"rx_corrected_bits(_phy)?|rsfec_correctable_word"),
    _rule("fec_corrected_blocks_per_s", r"rx_fec_corrected_blocks"),
    _rule("fec_uncorrectable_per_s", r"rx_fec_uncorrectable_blocks|rsfec_uncorrectable_word"),
    _rule("rx_bits_per_s", r"rx_bits_phy"),
    _rule("symbol_errors_per_s", r"rx_symbol_err(ors)?_phy|rx_symbol_err"),
    _rule("pcs_symbol_errors_per_s", r"rx_pcs_symbol_err(_phy)?"),
    _rule("rx_crc_errors_per_s", r"rx_crc_errors(_phy)?|rx_fcs_err_frames|(port\.)?rx_crc_errors(\.nic)?|frames_rx_bad_fcs"),
    _rule("rx_discards_per_s", r"rx_discards_phy|rx_total_discard_pkts|(port\.)?rx_dropped(\.nic)?|frames_rx_dropped|rx_drops"),
    _rule("tx_discards_per_s", r"tx_discards_phy|tx_total_discard_pkts|(port\.)?tx_dropped_link_down(\.nic)?|tx_drops"),
    _rule("rx_out_of_buffer_per_s", r"(rx|dev)_out_of_buffer"),
    _rule("link_downed_per_s", r"link_down_events(_phy)?"),
    _rule("ecn_marked_per_s", r"rx_prio\d_marked"),
    _rule("buffer_discards_per_s", r"rx_prio\d_(discards|cong_discard)"),
    _rule("pause_rx_plain", r"rx_pause_ctrl_phy|rx_pause_frames|(port\.)?link_xoff_rx(\.nic)?|frames_rx_(pri)?pause"),
    _rule("pause_tx_plain", r"tx_pause_ctrl_phy|tx_pause_frames|(port\.)?link_xoff_tx(\.nic)?|frames_tx_(pri)?pause"),
    _rule("pause_rx", r"rx_prio(\d)_pause|rx_pfc_ena_frames_pri(\d)|(?:port\.)?(?:priority_(\d)_xoff_rx|rx_priority_(\d)_xoff)(?:\.nic)?",
          Kind.EACH),
    _rule("pause_tx", r"tx_prio(\d)_pause|tx_pfc_ena_frames_pri(\d)|(?:port\.)?(?:priority_(\d)_xoff_tx|tx_priority_(\d)_xoff)(?:\.nic)?",
          Kind.EACH),
    _rule("pause_rx_us", r"rx_prio(\d)_pause_duration|rx_pripause_(\d)_1us_count", Kind.EACH),
    _rule("pause_tx_us", r"tx_prio(\d)_pause_duration|tx_pripause_(\d)_1us_count", Kind.EACH),
    _rule("pause_storms_per_s", r"tx_pause_storm_(warning|error)_events"),
    _rule("lane_errors", r"rx_err_lane_(\d+)_phy", Kind.EACH),
    _rule("pcie_stalled_read_ratio", r"outbound_pci_stalled_rd", Kind.PERCENT),
    _rule("pcie_stalled_write_ratio", r"outbound_pci_stalled_wr", Kind.PERCENT),
    _rule("pcie_overflows_per_s", r"outbound_pci_buffer_overflow"),
    _rule("pcie_signal_errors_per_s", r"[rt]x_pci_signal_integrity"),
    _rule("module_errors_per_s", r"module_(bus_stuck|high_temp|bad_shorted|unplug)"),
    _rule("allowance_exceeded_per_s", r"(bw_in|bw_out|pps|conntrack|linklocal)_allowance_exceeded"),
)  # fmt: skip
SAME_AS_IS = tuple(
    rule.column for rule in RULES if rule.column.endswith(("_per_s", "_ratio")) and rule.column != "rx_bits_per_s"
)


class Place(NamedTuple):
    """Where a statistic stands, what it feeds, and the number of its priority or lane."""

    position: int
    name: str
    rule: Rule
    number: int


def plan(statistic_names: Sequence[str]) -> list[Place]:
    """The statistics that matter; of two with one name the first counts."""
    places: list[Place] = []
    seen: set[str] = set()
    for position, name in enumerate(word.strip().lower() for word in statistic_names):
        for rule in RULES if name not in seen else ():
            if (found := rule.pattern.fullmatch(name)) is not None:
                digits = [group for group in found.groups() if group and group.isdigit()]
                places.append(Place(position, name, rule, int(digits[0]) if digits and rule.kind is Kind.EACH else 0))
                break
        seen.add(name)
    return places


def row_of(
    interface: str, places: Sequence[Place], values: Sequence[int], at_ns: int, deltas: Deltas, priority: int
) -> Row:
    """Columns of one interface.

    Parameters
    ----------
    priority
        The one that training traffic has; below 0: the busiest.
    """
    sums: dict[str, float] = {}
    each: dict[str, dict[int, float]] = {}
    for place in places:
        if place.position >= len(values):
            continue
        value, column = values[place.position], place.rule.column
        if place.rule.kind is Kind.PERCENT:
            sums[column] = value / 100
            continue
        rate = deltas.per_second((interface, place.name), value, at_ns)
        if place.rule.kind is Kind.SUM:
            sums[column] = sums.get(column, 0.0) + rate
        elif place.number < 64:
            each.setdefault(column, {})[place.number] = rate
    return {**{c: sums[c] for c in SAME_AS_IS if c in sums}, **_pauses(sums, each, priority), **_line(sums, each)}


def _pauses(sums: dict[str, float], each: dict[str, dict[int, float]], priority: int) -> dict[str, float]:
    row: dict[str, float] = {}
    for way in ("rx", "tx"):
        by_priority = each.get(f"pause_{way}", {})
        row |= {f"pause_{way}_prio{i}_per_s": rate for i, rate in by_priority.items() if i < PRIORITIES}
        row[f"pause_{way}_per_s"] = _chosen(by_priority, priority)
        row[f"pause_{way}_time_ratio"] = _chosen(each.get(f"pause_{way}_us", {}), priority) / US_PER_S
        plain = sums.get(f"pause_{way}_plain")
        if plain is not None or by_priority:
            row[f"pause_{way}_all_per_s"] = sum(by_priority.values()) + (plain or 0.0)
    return row


def _chosen(rates: dict[int, float], priority: int) -> float:
    return rates.get(priority, NAN) if priority >= 0 else highest(rates.values())


def _line(sums: dict[str, float], each: dict[str, dict[int, float]]) -> dict[str, float]:
    row = {"lane_errors_max_per_s": highest(each.get("lane_errors", {}).values())}
    bits, wrong = sums.get("rx_bits_per_s", NAN), sums.get("fec_corrected_per_s", NAN)
    if bits > 0 and not math.isnan(wrong):
        row["bit_error_ratio"] = wrong / bits
    return row
