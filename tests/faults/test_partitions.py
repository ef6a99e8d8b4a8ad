"""A topic that somebody made with too few partitions is refused in one sentence, by everybody, before anything is read or written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient, NewTopic

from tests.faults.processes import ROOT
from trainwarden import topics
from trainwarden.bus import connect
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.embedded.ports import free_port

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

REFUSAL = (
    "topic tw.ticks has 1 partitions, 4 are needed: add them (kafka-topics.sh --alter --topic tw.ticks --partitions 4)"
)


def test_a_topic_with_too_few_partitions_is_refused_and_works_once_they_are_added(
    kafka_runtime: None, tmp_path: Path
) -> None:
    with ApacheKafka(tmp_path / "kafka") as kafka:
        admin = KafkaAdminClient(bootstrap_servers=[kafka.bootstrap])
        admin.create_topics([NewTopic("tw.ticks", num_partitions=1, replication_factor=1)])
        config = tmp_path / "trainwarden.toml"
        config.write_text(
            f'cluster = "c"\nrun_dir = "{tmp_path}"\n[kafka]\nurl = "kafka://{kafka.bootstrap}"\n'
            f'[streams]\nweb_listen = "127.0.0.1:{free_port()}"\n[store]\nurl = "clickhouse://127.0.0.1:{free_port()}/t"\n'
            'directory = "store"\n'
        )
        for words in (("worker",), ("store",), ("topics",)):
            code, text = ran(*words, "--config", str(config))
            assert code != 0, text
            assert REFUSAL in " ".join(text.split()), text
            assert "Traceback" not in text
        subprocess.run([sys.executable, "-c", ADD.format(kafka.bootstrap)], check=True, timeout=60)
        connect(f"kafka://{kafka.bootstrap}").ensure_topics(topics.ALL)
        code, text = ran("topics", "--config", str(config))
        assert code == 0, text
        admin.close()


ADD = (
    "from kafka.admin import KafkaAdminClient, NewPartitions; "
    "KafkaAdminClient(bootstrap_servers=['{}']).create_partitions({{'tw.ticks': NewPartitions(total_count=4)}})"
)


def ran(*words: str) -> tuple[int, str]:
    """Code and output of a command of ours that must end by itself."""
    command = [sys.executable, "-m", "trainwarden.cli", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr
