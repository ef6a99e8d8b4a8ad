"""The operator's own table of nodes: CSV with a head line, or TOML. It is believed before anything that is found out.

CSV: ``node,rack,leaf,spine,rail,pdu,cooling_zone`` in any order, other columns too; the node column takes host lists (``gpu[001-032]``).
TOML: ``[nodes."gpu[001-032]"]`` tables of strings. A later row or table adds to an earlier one for the same node.
"""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Iterator

from collectors.topology.hostlist import HostlistError, expand_hosts, matches

KEY = re.compile(r"[a-z][a-z0-9_]{0,40}")
MAX_VALUE = 200
RESERVED = ("rail_address", "probe_address", "rdma_address", "origins")
"""What only the collector itself can say."""


class InventoryError(ValueError):
    """A table that nobody can use; the message names line or table, what was found and what was expected."""


def attributes_of(text: str, node: str, toml: bool) -> dict[str, str]:
    """What the table says of `node`; empty when it is not in it.

    Raises
    ------
    InventoryError
        For a table that is wrong anywhere, also in rows of other nodes: half a table would place half the cluster.

    Examples
    --------
    >>> attributes_of("node,rack,leaf\\ngpu[01-32],r1,leaf7\\ngpu02,,leaf8\\n", "gpu02", toml=False)
    {'rack': 'r1', 'leaf': 'leaf8'}
    """
    found: dict[str, str] = {}
    for where, hosts, row in _toml_rows(text) if toml else _csv_rows(text):
        _check(where, row)
        try:
            here = matches(hosts, node)
            if not here and "[" in hosts:
                expand_hosts(hosts)  # a broken list of other nodes is as wrong
        except HostlistError as error:
            raise InventoryError(f"{where}: {error}") from None
        if here:
            found |= {key: value for key, value in row.items() if value}
    return found


def _check(where: str, row: dict[str, str]) -> None:
    for key, value in row.items():
        if not KEY.fullmatch(key) or key in RESERVED:
            raise InventoryError(
                f"{where}: {key[:50]!r} is no name for an attribute, expected small letters such as rack or cooling_zone"
            )
        if len(value) > MAX_VALUE:
            raise InventoryError(f"{where}: {key} has {len(value)} characters, expected at most {MAX_VALUE}")


def _csv_rows(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), skipinitialspace=True)
    try:
        head = [name.strip() for name in next(reader, [])]
        if "node" not in head or len(set(head)) < len(head):
            raise InventoryError(
                f"line 1: columns are {', '.join(head)[:100] or 'none'}, expected node and each of the others once"
            )
        for cells in reader:
            if not cells or cells[0].startswith("#"):
                continue
            if len(cells) != len(head):
                raise InventoryError(
                    f"line {reader.line_num}: {len(cells)} cells, expected {len(head)} as in the head line"
                )
            row = {name: cell.strip() for name, cell in zip(head, cells, strict=True)}
            yield f"line {reader.line_num}", row.pop("node"), row
    except csv.Error as error:
        raise InventoryError(f"line {reader.line_num}: {error}") from None


def _toml_rows(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InventoryError(f"not TOML: {error}") from None
    nodes = document.get("nodes")
    if not isinstance(nodes, dict):
        raise InventoryError('no table [nodes]: expected tables such as [nodes.gpu001] with rack = "r1"')
    for hosts, row in nodes.items():
        where = f"nodes.{hosts[:60]}"
        if not isinstance(row, dict) or not all(
            isinstance(value, str | int) and not isinstance(value, bool) for value in row.values()
        ):
            raise InventoryError(f'{where}: expected a table of strings such as rack = "r1"')
        yield where, hosts, {key: str(value) for key, value in row.items()}
