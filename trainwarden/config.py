"""Configuration: one TOML file for all parts; every key has a default, an unknown key is an error.

Tables of plugins (`detectors.<name>`, `rails.<name>`, `collector.sources.<name>`, `backends.<name>`, `notify.<receiver>`) are
checked against the plugin's own `Settings` by whoever owns the plugins, through `Config.plugin`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwarden.addresses import hide_password
from trainwarden.errors import ConfigError
from trainwarden.policy import KINDS, Policy, override_kind
from trainwarden.records import Mode, Verb
from trainwarden.settings import option, parse_settings, unknown_key

S = TypeVar("S")

FOUND_HERE = (Path("trainwarden.toml"), Path("demo-run/trainwarden.toml"))
"""Where a configuration is looked for when none is named: a user's own, then that of the last demonstration."""

PLUGIN_TABLES = ("detectors", "rails", "backends", "notify")


@dataclass(frozen=True)
class KafkaConfig:
    """Where the records go."""

    url: str = option(
        "kafka://127.0.0.1:9092", "bus of all parts: kafka://host:port[,host:port], or memory://name within one process"
    )
    security: str = option("plaintext", "how to talk to the broker: plaintext, ssl, sasl_plaintext or sasl_ssl")
    ca_file: Path | None = option(
        None, "PEM certificates that the broker's own must descend from; default: those of the system"
    )
    certificate_file: Path | None = option(None, "PEM certificate by which a broker that asks for one knows this part")
    key_file: Path | None = option(None, "its private key; default: it stands in certificate_file")
    check_hostname: bool = option(True, "whether the broker's certificate must name the address that was called")
    sasl_mechanism: str = option("SCRAM-SHA-512", "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")
    username: str = option("", "user for sasl_ssl and sasl_plaintext")
    password_file: Path | None = option(None, "file with that user's password, readable by this part alone")


@dataclass(frozen=True)
class StoreConfig:
    """The analysts' store."""

    url: str = option("clickhouse://127.0.0.1:8124/trainwarden", "ClickHouse, or the embedded store's own address")
    directory: Path | None = option(
        None, "set: the store process opens chDB here and serves `url` itself; unset: a ClickHouse server is used"
    )
    batch_ms: int = option(
        500, "age of a batch; up to twenty times this where inserting would take over a twentieth of the time"
    )
    batch_rows: int = option(500_000, "rows that close a batch early")
    nice: int = option(
        5,
        "by so much (0 to 19) the embedded store gives way to others on its machine: what it merges may wait, detection not",
    )
    metrics_listen: str = option("", "host:port of the writer's Prometheus page; empty: none")

    @property
    def shown_url(self) -> str:
        """`url` without its password, for logs and messages."""
        return hide_password(self.url)


@dataclass(frozen=True)
class CollectorConfig:
    """One node's agent."""

    node: str = option("", "name of this node in the cluster; default: the host name")
    rack: str = option("", "rack, for the partition key and the topology")
    interval_ms: int = option(1000, "sampling interval; ticks lie on multiples of it")
    socket: Path | None = option(None, "unix datagram socket of the training hook; default: <run_dir>/<node>/hook.sock")
    spool_directory: Path | None = option(
        None, "where records wait while Kafka is away; default: <run_dir>/<node>/spool"
    )
    spool_bytes: int = option(256 * 1024 * 1024, "size of the spool before low-value samples are thinned")
    root: Path = option(Path("/"), "root of /proc and /sys (fixtures, or the host's mount in a container)")
    rail_address: str = option("", "address of this node on the training network; probes leave from it")
    probe_port: int = option(9471, "UDP port of the probe responder on rail_address; 0 switches probing off")
    peers: dict[str, str] = option({}, 'node = "ip:port" of probe responders, beside those learnt from the topology')
    log_files: dict[str, str] = option(
        {}, "name = path of files to tail, or of /dev/kmsg; the name stands on their events"
    )
    metrics_listen: str = option("", "host:port of the Prometheus page; empty: none")
    sources: dict[str, dict[str, Any]] = option({}, "settings of sources; `enabled = false` switches one off")


@dataclass(frozen=True)
class StreamsConfig:
    """The stream worker."""

    group: str = option("tw.worker", "consumer group of raw records")
    stages: int = option(
        1,
        "1: one worker detects and others stand by; 2: the workers share the work, for clusters that one cannot carry",
    )
    lateness_ms: int = option(2000, "how long a tick waits for missing nodes")
    forget_node_s: float = option(60.0, "a silent node is expected for so long, then forgotten")
    cut_ms: int = option(250, "cadence of frames: the grain of detection delay")
    snapshot_s: float = option(10.0, "cadence of state snapshots")
    web_listen: str = option("127.0.0.1:9481", "host:port of health and self-metrics")
    data_directory: Path | None = option(None, "scratch directory of the worker; default: <run_dir>/worker")


@dataclass(frozen=True)
class RiskConfig:
    """How often the cluster may call for nothing; see `streams.budget`."""

    false_incidents_per_day: float = option(
        1.0, "incidents a day that statistics alone may open in vain, of the whole cluster and all detectors together"
    )
    burst: float = option(3.0, "so many of each family of detectors at once, before the daily number counts")
    patience_s: float = option(300.0, "an opinion that is kept back opens its incident once it has stood for so long")


@dataclass(frozen=True)
class HealthConfig:
    """When Trainwarden calls itself unwell; see `trainwarden.vitals`."""

    late_s: float = option(
        15.0, "a worker whose newest closed tick, or a store whose oldest row still to write, is older is late"
    )
    refused_per_minute: float = option(60.0, "so many dead letters a minute are worth a call")


@dataclass(frozen=True)
class ActionsConfig:
    """The action service."""

    listen: str = option("127.0.0.1:9480", "host:port of the status page and the operator's API")
    backend: str = option("warden", "who carries actions out")
    ledger: Path | None = option(None, "SQLite ledger; default: <run_dir>/ledger.sqlite")
    token_file: Path | None = option(
        None, "file with the operator's token; default: <run_dir>/operator.token, made on first start"
    )
    kill_switch: Path | None = option(None, "when this file exists nothing is done; default: <run_dir>/KILL_SWITCH")
    plan_ttl_s: float = option(60.0, "a plan not begun by then expires")
    verify_s: float = option(60.0, "a restarted job must advance past the fault within this time")
    min_nodes: int = option(2, "a job is never shrunk below this number of nodes")
    node_unit: int = option(1, "jobs shrink in multiples of this number of nodes")


@dataclass(frozen=True)
class PolicyConfig:
    """The operator's will; see `trainwarden.policy`."""

    mode: Mode = option(Mode.RECOMMEND, "ceiling for everything: observe, recommend, approve or auto")
    verbs: dict[str, Mode] = option({}, 'stricter modes for single verbs, e.g. isolate = "approve"')
    jobs: dict[str, Mode] = option({}, "stricter modes for single jobs")
    kinds: dict[str, dict[str, Any]] = option({}, "overrides of reach, remedy and severity per kind of fault")


@dataclass(frozen=True)
class Config:
    """Everything, resolved. Build it with `load` or `from_table`."""

    cluster: str = option("default", "name of the cluster; stands on every record")
    run_dir: Path = option(Path("run"), "sockets, spools, ledger, logs: nothing is written outside it")
    kafka: KafkaConfig = option(KafkaConfig(), "")
    store: StoreConfig = option(StoreConfig(), "")
    collector: CollectorConfig = option(CollectorConfig(), "")
    streams: StreamsConfig = option(StreamsConfig(), "")
    risk: RiskConfig = option(RiskConfig(), "")
    health: HealthConfig = option(HealthConfig(), "")
    actions: ActionsConfig = option(ActionsConfig(), "")
    policy_table: PolicyConfig = option(PolicyConfig(), "")
    plugins: dict[str, dict[str, dict[str, Any]]] = option({}, "tables of plugins, unparsed")

    @property
    def policy(self) -> Policy:
        """The policy with the operator's overrides applied."""
        table = self.policy_table
        kinds = dict(KINDS)
        for name, changes in table.kinds.items():
            if name not in kinds:
                raise ConfigError(unknown_key("policy.kinds", name, list(kinds)))
            kinds[name] = override_kind(kinds[name], changes)
        verbs = {_verb(name): mode for name, mode in table.verbs.items()}
        return Policy(table.mode, verbs, dict(table.jobs), kinds)

    def plugin(self, table: str, name: str, settings: type[S]) -> S:
        """Settings of one plugin: the keys of ``[<table>.<name>]`` except `enabled` and `type`."""
        entries = {k: v for k, v in self.plugins.get(table, {}).get(name, {}).items() if k not in ("enabled", "type")}
        return parse_settings(settings, entries, f"{table}.{name}")

    def enabled(self, table: str, name: str, default: bool = True) -> bool:
        """Whether a plugin is switched on (``enabled = false`` in its table switches it off)."""
        return bool(self.plugins.get(table, {}).get(name, {}).get("enabled", default))

    def path(self, given: Path | None, *default: str) -> Path:
        """`given`, or `default` under the run directory; relative paths lie under the run directory."""
        return self.run_dir / (given if given is not None else Path(*default))


def _verb(name: str) -> Verb:
    try:
        return Verb(name)
    except ValueError:
        raise ConfigError(unknown_key("policy.verbs", name, [v.value for v in Verb])) from None


def from_table(table: Mapping[str, Any]) -> Config:
    """Configuration from a parsed TOML document."""
    own = {key: value for key, value in table.items() if key not in PLUGIN_TABLES}
    if "policy" in own:
        own["policy_table"] = own.pop("policy")
    known = [
        *(k if k != "policy_table" else "policy" for k in Config.__dataclass_fields__ if k != "plugins"),
        *PLUGIN_TABLES,
    ]
    for key in table:
        if key not in known:
            raise ConfigError(unknown_key("", key, known))
    own["plugins"] = {name: dict(table[name]) for name in PLUGIN_TABLES if name in table}
    try:
        config = parse_settings(Config, own, "")
    except ConfigError as error:
        raise ConfigError(str(error).replace("policy_table", "policy")) from None
    _require_sense(config)
    config.policy  # noqa: B018 - a wrong policy is an error at load, not at the first incident
    return config


def _require_sense(config: Config) -> None:
    """Numbers within their limits; of times that are a cadence: at 0 a loop would divide by it, or never rest."""
    for table, key in (("collector", "interval_ms"), ("streams", "cut_ms"), ("streams", "snapshot_s")):
        value = getattr(getattr(config, table), key)
        if value <= 0:
            raise ConfigError(f"{table}.{key}: found {value:g}, expected a time above 0")
    if not 0 <= config.store.nice <= 19:
        raise ConfigError(f"store.nice: found {config.store.nice}, expected 0 (as others) to 19 (after all others)")
    if config.streams.stages not in (1, 2):
        raise ConfigError(f"streams.stages: found {config.streams.stages}, expected 1 or 2")
    if config.risk.burst < 1:
        raise ConfigError(
            f"risk.burst: found {config.risk.burst:g}, expected 1 or more, else nothing could ever be said"
        )
    if not config.risk.false_incidents_per_day > 0:
        raise ConfigError(
            f"risk.false_incidents_per_day: found {config.risk.false_incidents_per_day:g}, expected a number above 0"
        )


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """Configuration from `path`, else ``$TRAINWARDEN_CONFIG``, else the first of `FOUND_HERE` that exists, else the defaults.

    Raises
    ------
    ConfigError
        Unreadable file, broken TOML (with line), unknown key, wrong value.
    """
    named = environment.get("TRAINWARDEN_CONFIG")
    chosen = path or (Path(named) if named else next((place for place in FOUND_HERE if place.exists()), None))
    if chosen is None:
        return from_table({})
    try:
        document = tomllib.loads(chosen.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{chosen}: cannot be read ({error.strerror}): give a readable file with --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{chosen}: not TOML: {error}") from None
    try:
        return from_table(document)
    except ConfigError as error:
        raise ConfigError(f"{chosen}: {error}") from None
