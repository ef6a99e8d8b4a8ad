"""The tables of `docs/simulator.md`, from the code: ``python -m collectors.simulated.describe`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from collectors.simulated.families import BOARD, GPU, PORT
from collectors.simulated.faults import kinds
from collectors.simulated.faults.base import FaultKind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"

SOURCES = {
    1: "Lablup B200 2 of 17 faults; Fire-Flyer 37 Xids; Minder 2.0 % card drop",
    2: "Llama 3: 72 + 19 of 419 interruptions; Minder 38.9 %",
    3: "Lablup B200 2 of 17; Fire-Flyer 13 Xids",
    4: "Fire-Flyer 17 Xids",
    5: "SuperBench 3.19 % and 0.18 % of nodes",
    6: "Delta: 8 on 608 H100",
    7: "NVIDIA Xid 92; magnitude ours",
    8: "Delta 3,857 events on A100; Llama 3 17",
    9: "Delta, 97.6 % fatal to the job",
    10: "Greyhound: 20 % for 10 min; MegaScale: 0.5 % of machines 10 % slow",
    11: "Llama 3: 1 to 2 % with the time of day; FT-HSDP 2 cases",
    12: "Llama 3: power supply 3",
    13: "magnitude ours",
    14: "MegaScale 0.5 % of machines; SuperBench 0.23 to 1.59 %; ByteDance trace AR 2.35 times",
    15: "Fire-Flyer 42.6 % of Xids; Acme 30.25 %",
    16: "NVIDIA SXid",
    17: "Fire-Flyer 19.2 %; Unicron 2.1 %",
    18: "Acme 3.28 %",
    19: "Llama 3 6; FT-HSDP 5.5 %",
    20: "Minder 6.6 %; SuperBench 2.03 %",
    21: "Meta RSC 15.4 % of lemons; FT-HSDP 18.0 %",
    22: "Greyhound: 21.6 % for 10 min, 5 of 499",
    23: "MegaScale",
    24: "SuperBench 1.33 %",
    25: "Philly, its most frequent failure",
    26: "Meta RSC 20.5 % of lemons",
    27: "FT-HSDP 5.8 and 5.6 %",
    28: "Minder 6.0 %; Acme 14.3 %",
    29: "operators' practice",
    31: "operators' practice",
    33: "FT-HSDP 4.4 %; Llama 3 3",
    34: "Minder 5.7 %; Llama 3 7",
    35: "Unicron 3.9 %; Fire-Flyer about 200 a year",
    36: "SuperBench 6.04 % of nodes",
    37: "Llama 3 35 with switches; Minder 0.9 %",
    38: "Greyhound: 42 of 107 jobs, down to 15 % for hours",
    39: "inside rows 20 and 38",
    40: "Unicron 4.0 %; 0.01 % can halve RoCE",
    41: "Llama 3 35 with cables",
    42: "C4: a gap of 30 %",
    44: "Unicron 10.1 %; FT-HSDP 9.0 %; ByteRobust 9.9 %",
    45: "inside row 44",
    46: "Acme 4.4 and 2.1 %; Minder 5.7 %",
    47: "Philly 21.7 % of failed run time",
    48: "Acme; ByteRobust",
    49: "ByteDance, its main cause: 1.18 times in trace ST",
    50: "ByteDance: 1.54 times in trace SE",
    51: "ByteRobust 17.3 %",
    52: "Llama 3 32; Meta RSC preempted 10 %",
    53: "Meta RSC 40 lemons",
    54: "operators' practice",
}


def fault_table() -> str:
    """All kinds, by class and row of the taxonomy."""
    head = "| kind | row | strikes | magnitude | course, usual length | signals that must move | right answer | bad node | source |"
    rows = [head, "|" + " --- |" * 9]
    for kind in sorted(kinds().values(), key=lambda kind: (kind.number, kind.name)):
        rows.append("| " + " | ".join(_cells(kind)) + " |")
    return "\n".join(rows)


def _cells(kind: FaultKind) -> list[str]:
    low, usual, high = kind.magnitude
    size = f"{low:g} … **{usual:g}** … {high:g} {kind.unit}" if low != high else "-"
    ends = f", fails at {kind.stop_at:.0%}" if kind.stop_at else ""
    signals = " ".join(f"`{signal}`" for signal in kind.signals)
    return [f"`{kind.name}`", str(kind.number), str(kind.scope), size, f"{kind.course}, {kind.duration_s:g} s{ends}", signals, kind.action,
            "yes" if kind.bad_node else "no", SOURCES.get(kind.number, "")]  # fmt: skip


def column_table() -> str:
    """Families that no source of the collector has yet."""
    rows = ["| family | column | unit | kind | meaning |", "|" + " --- |" * 5]
    for family in (GPU, PORT, BOARD):
        rows += [f"| {family.name} | `{m.name}` | {m.unit} | {m.kind} | {m.help} |" for m in family.metrics]
    return "\n".join(rows)


def filled(text: str) -> str:
    """`text` with its generated parts made anew."""
    for name, table in (("faults", fault_table()), ("columns", column_table())):
        pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
