"""Secrets stay on the node, and what is none stays readable. The values below are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.logs.secrets import redact, shapes
from tests.collectors.logs.steps_of_regex import nested_quantifiers

A = "A1b2C3d4E5f6G7h8I9j0"


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("using AKIAABCDEFGHIJKLMNOP now", "AKIAABCDEFGHIJKLMNOP"),
        (f"aws_secret_access_key = {A}{A}", A),
        (f"cloning with ghp_{A}{A}", A),
        (f"cloning with github_pat_{A}_{A}", A),
        (f"glpat-{A} refused", A),
        (f"HF_TOKEN=hf_{A}{A}", A),
        (f"login hf_{A}{A} ok", A),
        (f"xoxb-123456789012-{A}", A),
        (f"https://hooks.slack.com/services/T000/B000/{A}", A),
        (f"OPENAI sk-{A}{A}", A),
        (f"cookie eyJhbGciOiJI.eyJzdWIiOiIx.{A}", A),
        (f"Authorization: Bearer {A}", A),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ('{"authorization": "Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
        ("git clone https://me:hunter2@host/x.git", "hunter2"),
        ("Authorization: abc123", "abc123"),
        ('password: "two words"', "two words"),
        ("MINIO_SECRET_KEY=abcdefgh", "abcdefgh"),
        ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
        ("--api-key=abcdef", "abcdef"),
        ("MY_ACCESS_TOKEN: abcdef", "abcdef"),
        ("-----BEGIN RSA PRIVATE KEY-----MIIEow", "MIIEow"),
        ("File /home/jane/train.py", "jane"),
    ],
)
def test_each_shape(line: str, secret: str) -> None:
    assert secret not in redact(line)


@pytest.mark.parametrize(
    "line",
    [
        "tokens per second: 8123, token count 12",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.",
        "http://[::1]:9092 and s3://bucket/path",
        "consumed tokens:  16668622848 | elapsed time per iteration (ms): 421634.1",
        "ask-a-question eyJustice tokenizer=bpe passwords",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redact(line) == line


@given(line=st.text(max_size=300))
def test_masking_twice_is_masking_once(line: str) -> None:
    assert redact(redact(line)) == redact(line)


def test_no_shape_can_run_away() -> None:
    assert [shape.regex.pattern for shape in shapes() if nested_quantifiers(shape.regex.pattern)] == []
