"""Ports for a test's programs."""

import errno
import random
import socket

# Below those that the kernel gives to connections, and to listeners that ask for any port: none of
# another test's is given it before its use.
CHOICE = range(16000, 32000)


def free_port():
    """Returns a port of 127.0.0.1 that is free now."""
    while True:
        port = random.SystemRandom().choice(CHOICE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
