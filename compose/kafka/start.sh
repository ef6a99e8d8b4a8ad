#!/bin/sh
# One Apache Kafka node (KRaft, broker and controller in one process) in the foreground, without Docker.
#
#   start.sh DATA_DIR [PORT]     start a node
#   start.sh --fetch             only look for Java and fetch the artifacts
#
# The first run fetches Kafka's published artifacts with Maven (45 MB), an empty DATA_DIR is formatted. Java 17 or newer.
# Environment: KAFKA_LIB (folder of jars), KAFKA_HEAP (512m), KAFKA_HOST (127.0.0.1), KAFKA_CONTROLLER_PORT (PORT + 1),
# KAFKA_MORE_PROPERTIES (a file; what stands in it wins, for listeners with TLS and SASL for example), KAFKA_FORMAT_OPTIONS (words for
# the formatting of an empty DATA_DIR, such as --add-scram ...), JAVA_HOME, KAFKA_JVM_OPTIONS (added last).
set -eu

fail() {
    echo "start.sh: $*" >&2
    exit 2
}

[ $# -ge 1 ] || fail "usage: start.sh DATA_DIR [PORT], or start.sh --fetch"
here=$(cd "$(dirname "$0")" && pwd)
data=$1
port=${2:-9092}
host=${KAFKA_HOST:-127.0.0.1}
controller_port=${KAFKA_CONTROLLER_PORT:-$((port + 1))}
version=$(sed -n 's:.*<kafka.version>\(.*\)</kafka.version>.*:\1:p' "$here/pom.xml")
cache=${TRAINWARDEN_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/trainwarden}
lib=${KAFKA_LIB:-$cache/kafka-$version}
java=${JAVA_HOME:+$JAVA_HOME/bin/}java

command -v "$java" >/dev/null 2>&1 || fail "no Java found ($java): install a Java 17 runtime or set JAVA_HOME"
java_version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
[ "${java_version:-0}" -ge 17 ] || fail "$java is Java ${java_version:-of an unknown version}, Kafka $version needs 17 or newer: set JAVA_HOME"

if [ ! -e "$lib/complete" ]; then
    command -v mvn >/dev/null 2>&1 || fail "no Maven (mvn) found to fetch Kafka $version into $lib: install it or set KAFKA_LIB"
    mkdir -p "$lib"
    mvn -B -q -f "$here/pom.xml" dependency:copy-dependencies -DincludeScope=runtime "-DoutputDirectory=$lib" >&2 ||
        fail "Maven could not fetch Kafka $version into $lib: see its message above, or set KAFKA_LIB to a folder that has it"
    : >"$lib/complete"
fi
if [ "$data" = --fetch ]; then
    echo "$lib"
    exit 0
fi

mkdir -p "$data/tmp" || fail "data directory $data cannot be made"
data=$(cd "$data" && pwd)

# Written at each start: the ports may differ, the data do not care.
cat >"$data/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller_port
listeners=PLAINTEXT://$host:$port,CONTROLLER://127.0.0.1:$controller_port
advertised.listeners=PLAINTEXT://${KAFKA_ADVERTISED_HOST:-$host}:$port
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=$data/log
# one node: everything internal has one copy, and groups form at once
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
# after a kill -9 the old session must be over before the broker may register again
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
# the cleaner's default buffer alone is 128 MiB
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
PROPERTIES
[ -z "${KAFKA_MORE_PROPERTIES:-}" ] || cat "$KAFKA_MORE_PROPERTIES" >>"$data/server.properties" ||
    fail "KAFKA_MORE_PROPERTIES: $KAFKA_MORE_PROPERTIES cannot be read"

# No performance file and no native library outside DATA_DIR; a quick start counts more than peak speed on one node.
set -- "-Xms64m" "-Xmx${KAFKA_HEAP:-512m}" -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Xshare:auto \
    "-Djava.io.tmpdir=$data/tmp" -Djava.awt.headless=true "-Dlog4j2.configurationFile=$here/log4j2.properties" \
    -cp "$lib/*"

if [ ! -e "$data/log/meta.properties" ]; then
    # shellcheck disable=SC2086  # options are words
    "$java" "$@" kafka.tools.StorageTool format --cluster-id 5L6g3nShT-eMCtK--X86sw --ignore-formatted ${KAFKA_FORMAT_OPTIONS:-} \
        --config "$data/server.properties" >"$data/format.log" 2>&1 ||
        fail "data directory $data could not be formatted: $(grep -v '^[[:space:]]*at ' "$data/format.log" | tail -n 1)"
fi

# shellcheck disable=SC2086  # options are words
exec "$java" ${KAFKA_JVM_OPTIONS:-} "$@" kafka.Kafka "$data/server.properties"
