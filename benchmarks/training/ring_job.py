"""A ring over plain sockets, as an all-reduce uses them: in every step each rank sends to the next and hears the one before."""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time

PORT = 29555
RETRY_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--bytes", type=int, default=65536)
    parser.add_argument("--pause-ms", type=float, default=4.0)
    given = parser.parse_args()
    addresses = given.addresses.split(",")
    before, after = meet(addresses[given.rank], addresses[(given.rank + 1) % len(addresses)])
    load = bytes(given.bytes)
    with open(f"{given.rows}.n{given.rank}", "a", buffering=1, encoding="ascii") as rows:
        rows.write(f"# pid {os.getpid()}\n")
        step = 0
        while True:
            time.sleep(given.pause_ms / 1000)
            sending = threading.Thread(target=after.sendall, args=(load,))
            sending.start()
            left = given.bytes
            while left:
                got = len(before.recv(left))
                if not got:
                    return
                left -= got
            sending.join()
            rows.write(f"{step} {time.time_ns()}\n")
            step += 1


def meet(own: str, following: str) -> tuple[socket.socket, socket.socket]:
    """Connections from the rank before and to the one after."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((own, PORT))
    listener.listen()
    while True:
        after = socket.socket()
        after.bind((own, 0))
        try:
            after.connect((following, PORT))
            break
        except OSError:
            after.close()
            time.sleep(RETRY_S)
    before, _ = listener.accept()
    for end in (before, after):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return before, after


if __name__ == "__main__":
    main()
