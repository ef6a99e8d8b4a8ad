"""The table of gap reasons: the page shows it, and every code that the code can give is in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors.nvidia import wire
from collectors.reasons import PARTS, REASONS, meaning, table

ROOT = Path(__file__).parents[2]
GIVERS = {"Gap": 1, "SourceError": 0, "PageError": 0, "_gap": 1, "_error": 0, "_complain": 0}
"""What makes a reason, and which of its arguments that is."""
KEEPERS = ("_problem", "_problems", "_reasons")


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs/collectors.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- reasons -->\n")[2].partition("<!-- /reasons -->")[0]
    assert shown == table(), "put what collectors.reasons.table() gives between the marks of docs/collectors.md"


def literals() -> Iterator[tuple[str, str]]:
    """(place, reason) of every reason that stands as text in the code of the sources."""
    for path in sorted((ROOT / "collectors").rglob("*.py")):
        if "simulated" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for value in given(node):
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
                    yield f"{path.relative_to(ROOT)}:{value.lineno}", value.value


def given(node: ast.AST) -> list[ast.expr]:
    """Expressions that become a reason at this node."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        at = GIVERS.get(name)
        return choices(node.args[at]) if at is not None and len(node.args) > at else []
    if isinstance(node, ast.Assign):
        bases = [target.value if isinstance(target, ast.Subscript) else target for target in node.targets]
        return choices(node.value) if any(getattr(base, "attr", "") in KEEPERS for base in bases) else []
    return []


def choices(node: ast.expr) -> list[ast.expr]:
    """Both branches of ``a if b else c``; of ``f"code:{detail}"`` the code."""
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        code, colon, _ = str(node.values[0].value).partition(":")
        return [ast.Constant(code, lineno=node.lineno)] if colon else []
    return [*choices(node.body), *choices(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def test_every_reason_that_stands_in_the_code_is_in_the_table() -> None:
    found = list(literals())
    assert len({reason for _, reason in found}) > 20
    assert [(place, reason) for place, reason in found if not meaning(reason)] == []
    assert [reason for reason in wire.REASONS.values() if not meaning(reason)] == []


def test_a_reason_that_nobody_can_give_is_not_in_the_table() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "collectors").rglob("*.py")
        if path.name != "reasons.py" and "simulated" not in path.parts
    )
    assert [
        code for code in REASONS if f'"{code}"' not in text and f"_{code}" not in text and f"{code}:" not in text
    ] == []
    assert [part for part in PARTS if part not in text.lower()] == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("hung:mlx5_0/1", "asked, and no answer came (mlx5_0/1)"),
        ("smi_timeout", "the vendor's tool: no whole answer within the deadline"),
        ("over_limit:731", "more files or ranks than are followed (731)"),
        ("counters_nonsense", ""),
        ("", ""),
    ],
)
def test_what_a_reason_means(reason: str, said: str) -> None:
    assert meaning(reason) == said
