"""A healthy live job on a machine with ten times too much to do: nobody may be blamed for it."""

from __future__ import annotations

from pathlib import Path

from streams import recording
from streams.replay import replay_records
from trainwarden.config import Config
from trainwarden.records import StepReport, decode

LOADED = Path(__file__).parent / "live" / "loaded_machine"


def test_noise_of_a_loaded_machine_raises_no_incident() -> None:
    records = [decode(message.value) for message in recording.read(LOADED)]
    rows = sum(len(record.rows) for record in records if isinstance(record, StepReport))
    assert rows > 5000
    assert [(i.kind, i.title) for i in replay_records(records, Config()).newest()] == []
