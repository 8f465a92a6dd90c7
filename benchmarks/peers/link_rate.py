"""Measures how fast one TCP connection is, in Gbit/s.

link_rate.py receive PORT          waits for one connection; prints the rate when it ends
link_rate.py send HOST PORT SECONDS
"""

import socket
import sys
import time

CHUNK = 1 << 18
WARM_UP = 0.3  # s, until the window is open and the shaper's credit is used up
PATIENCE = 20  # s


def receive(port):
    with socket.create_server(("", port)) as server:
        server.settimeout(PATIENCE)
        connection, _ = server.accept()
    connection.settimeout(PATIENCE)
    buffer = bytearray(CHUNK)
    begin, start, total = None, None, 0
    while True:
        got = connection.recv_into(buffer)
        now = time.monotonic()
        if got == 0:
            break
        begin = begin or now
        if start is None and now - begin >= WARM_UP:
            start = now
        elif start is not None:
            total, end = total + got, now
    if not total:
        sys.exit("link_rate: the connection ended before anything could be measured")
    print(f"{8e-9 * total / (end - start):.3f}")


def send(host, port, seconds):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=PATIENCE)
            break
        except ConnectionRefusedError:  # nobody listens yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    data = bytes(CHUNK)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(data)
    connection.close()


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    elif len(sys.argv) == 5 and sys.argv[1] == "send":
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(__doc__)


main()
