"""``trainwarden-rendezvous``: the rendezvous store as a process of its own.

No training node hosts the store, so no node's death takes the meeting point with it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from trainwarden_hook.addresses import UsageError, parse_endpoint, probe_port


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; exit code 2 for an unusable address."""
    parser = argparse.ArgumentParser(prog="trainwarden-rendezvous", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address to serve on; port 0 picks one")
    arguments = parser.parse_args(argv)
    try:
        host, port = parse_endpoint(arguments.listen, "--listen")
        probe_port(host, port)
        return serve(host, port)
    except UsageError as error:
        print(f"trainwarden-rendezvous: {error}", file=sys.stderr)
        return 2


def serve(host: str, port: int) -> int:
    """Host the store and sleep until a signal; returns 0."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    from torch.distributed import TCPStore

    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"cannot serve on {host}:{port}: {error}") from error
    print(f"rendezvous store on {host}:{store.port}", flush=True)
    signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
