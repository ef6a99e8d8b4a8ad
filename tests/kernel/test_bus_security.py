"""TLS and SASL to Apache Kafka, with certificates made here; and every wrong setting refused in one sentence."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.theatre import get
from tests.hook.cluster import wait_for
from tests.kernel.test_bus import publish, read
from trainwarden.bus import connect
from trainwarden.bus.security import Security, security_of
from trainwarden.config import KafkaConfig
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.embedded.ports import free_port
from trainwarden.errors import ConfigError, UnavailableError
from trainwarden.topics import Topic

SECRET = "correct-horse-7f"
pytestmark = pytest.mark.timeout(400)


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """A certificate authority of the test, and what it signed."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}.pem"
        key = str(folder / f"{name}.key")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key,
                "-out", str(self.certificate))  # fmt: skip

    def sign(self, subject: str, alternative: str) -> Path:
        """One PEM file with key and certificate."""
        base = self.folder / f"{self.name}-{subject}"
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={subject}", "-keyout", f"{base}.key",
                "-out", f"{base}.csr")  # fmt: skip
        base.with_suffix(".ext").write_text(f"subjectAltName={alternative}\n")
        openssl("x509", "-req", "-days", "2", "-in", f"{base}.csr", "-CA", str(self.certificate), "-CAkey",
                str(self.folder / f"{self.name}.key"), "-CAcreateserial", "-extfile", f"{base}.ext", "-out", f"{base}.crt")  # fmt: skip
        whole = base.with_suffix(".pem")
        whole.write_text(Path(f"{base}.key").read_text() + Path(f"{base}.crt").read_text())
        return whole


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Secured:
    """A Kafka node with a listener of each kind."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority = authority
        self.ports = {name: free_port() for name in ("SSL", "SASL_SSL", "SASL_PLAINTEXT")}
        self.own = authority.sign("broker", "IP:127.0.0.1")
        self.client = authority.sign("collector", "DNS:collector")
        self.password = folder / "password"
        self.password.write_text(f"{SECRET}\n")
        more = folder / "more.properties"
        port = free_port()
        more.write_text(self._properties(port, free_port()))
        scram = f"--add-scram SCRAM-SHA-512=[name=tw,password={SECRET}]"
        environment = {"KAFKA_MORE_PROPERTIES": str(more), "KAFKA_FORMAT_OPTIONS": scram}
        self.node = ApacheKafka(folder / "kafka", port, environment=environment)

    def _properties(self, port: int, controller_port: int) -> str:
        secured = ",".join(f"{name}://127.0.0.1:{number}" for name, number in self.ports.items())
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
        listeners = "".join(
            f"listener.name.{name}.sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN\n"
            f"listener.name.{name}.scram-sha-512.sasl.jaas.config={scram} required;\n"
            f'listener.name.{name}.plain.sasl.jaas.config={plain} required user_tw="{SECRET}";\n'
            for name in ("sasl_ssl", "sasl_plaintext")
        )
        return (
            f"controller.quorum.voters=1@127.0.0.1:{controller_port}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port},{secured}\n"
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{port},{secured}\n"
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL,"
            "SASL_PLAINTEXT:SASL_PLAINTEXT\n"
            f"ssl.keystore.type=PEM\nssl.keystore.location={self.own}\n"
            f"ssl.truststore.type=PEM\nssl.truststore.location={self.authority.certificate}\n"
            f"listener.name.ssl.ssl.client.auth=required\n{listeners}"
        )

    def config(self, protocol: str, **changes: Any) -> KafkaConfig:
        """The settings that are right for a listener, but for `changes`."""
        named: dict[str, Any] = {"url": f"kafka://127.0.0.1:{self.ports[protocol]}", "security": protocol.lower()}
        if protocol.endswith("SSL"):
            named["ca_file"] = self.authority.certificate
        if protocol == "SSL":
            named["certificate_file"] = self.client
        else:
            named |= {"username": "tw", "password_file": self.password}
        return KafkaConfig(**{**named, **changes})


@pytest.fixture(scope="module")
def secured(kafka_runtime: None, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"), authority)
    with made.node:
        yield made


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("protocol", "changes"),
    [("SSL", {}), ("SASL_SSL", {}), ("SASL_SSL", {"sasl_mechanism": "PLAIN"}), ("SASL_PLAINTEXT", {})],
)
def test_records_go_through(secured: Secured, protocol: str, changes: dict[str, str]) -> None:
    bus = connect(secured.config(protocol, **changes))
    bus.wait_ready(30)
    topic = Topic(
        f"secured-{protocol.lower()}-{changes.get('sasl_mechanism', 'scram')}", "key", "anything", partitions=1
    )
    bus.ensure_topics([topic])
    subscriber = bus.subscriber([topic.name], group="g")
    publish(bus, topic, [b"one", b"two"])
    assert read(subscriber, 2) == [b"one", b"two"]
    subscriber.close()


@pytest.mark.kafka
def test_who_has_no_right_gets_nothing(secured: Secured, authority: Authority, tmp_path: Path) -> None:
    """No certificate, one of a stranger, a broker nobody vouches for, a wrong password, no TLS where TLS is spoken."""
    stranger = Authority(tmp_path, "stranger")
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("SSL", {"certificate_file": None}),
        ("SSL", {"certificate_file": stranger.sign("intruder", "DNS:collector")}),
        ("SSL", {"ca_file": stranger.certificate}),
        ("SASL_SSL", {"password_file": wrong}),
        ("SASL_SSL", {"security": "sasl_plaintext", "ca_file": None}),
    ]

    def refusal(attempt: tuple[str, dict[str, Any]]) -> str:
        protocol, changes = attempt
        with pytest.raises(UnavailableError) as caught:
            connect(secured.config(protocol, **changes)).wait_ready(0)
        return str(caught.value)

    with ThreadPoolExecutor(len(attempts)) as pool:  # each is tried for two seconds
        assert not any(SECRET in sentence for sentence in pool.map(refusal, attempts))


@pytest.mark.kafka
@pytest.mark.slow
def test_a_worker_leads_on_a_secured_listener(secured: Secured, tmp_path: Path) -> None:
    """Faust, aiokafka and kafka-python in one process: all three must get through, on a listener that admits nobody unknown."""
    config, port = secured.config("SASL_SSL"), free_port()
    path = tmp_path / "trainwarden.toml"
    path.write_text(
        f'run_dir = "{tmp_path}"\n[kafka]\nurl = "{config.url}"\nsecurity = "sasl_ssl"\nca_file = "{config.ca_file}"\n'
        f'username = "tw"\npassword_file = "{config.password_file}"\n[streams]\nweb_listen = "127.0.0.1:{port}"\n'
    )
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "trainwarden.cli", "worker", "--config", str(path)]
        worker = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_for("the worker to lead", lambda: get(f"http://127.0.0.1:{port}/healthz").strip() == "leads", 90)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()
    assert SECRET not in log.read_text()


def test_nothing_is_asked_where_nothing_is_set() -> None:
    assert security_of(KafkaConfig()).options() == {}


def test_a_password_shows_nowhere(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(SECRET)
    made = security_of(KafkaConfig(security="sasl_plaintext", username="me", password_file=tmp_path / "p"))
    assert made.password == SECRET
    assert SECRET not in repr(made)


def test_faust_gets_its_own_words(tmp_path: Path) -> None:
    faust = pytest.importorskip("faust")
    from streams.app import _credentials

    assert _credentials(Security()) is None
    context = ssl.create_default_context()
    both = _credentials(Security("sasl_ssl", context, "SCRAM-SHA-512", "me", SECRET))
    assert isinstance(both, faust.SASLCredentials)
    assert (both.username, both.password, both.ssl_context) == ("me", SECRET, context)
    assert str(both.mechanism.value) == "SCRAM-SHA-512"
    assert isinstance(_credentials(Security("ssl", context)), faust.SSLCredentials)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"security": "tls"}, "kafka.security: found 'tls', expected one of plaintext, ssl"),
        ({"ca_file": "ca"}, "kafka.ca_file is set, but kafka.security is 'plaintext'"),
        ({"username": "me"}, "kafka.username is set, but kafka.security is 'plaintext'"),
        ({"security": "ssl", "ca_file": "missing"}, "kafka.ca_file: .*missing cannot be used: No such file"),
        ({"security": "ssl", "ca_file": "rubbish"}, "kafka.ca_file: .*rubbish cannot be used: no PEM"),
        ({"security": "ssl", "certificate_file": "rubbish"}, "kafka.certificate_file: .*cannot be used: no PEM"),
        ({"security": "sasl_ssl"}, "kafka.username is missing"),
        ({"security": "sasl_ssl", "username": "me"}, "kafka.password_file is missing"),
        ({"security": "sasl_ssl", "username": "me", "password_file": "missing"}, "kafka.password_file: .*No such file"),
        ({"security": "sasl_ssl", "username": "me", "password_file": "empty"}, "kafka.password_file: .* is empty"),
        (
            {"security": "sasl_ssl", "username": "me", "sasl_mechanism": "GSSAPI"},
            "kafka.sasl_mechanism: found 'GSSAPI'",
        ),
    ],
)
def test_wrong_settings(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    (tmp_path / "rubbish").write_text("no certificate")
    (tmp_path / "empty").write_text("\n")
    placed = {key: tmp_path / value if key.endswith("_file") else value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=sentence):
        security_of(KafkaConfig(**placed))
