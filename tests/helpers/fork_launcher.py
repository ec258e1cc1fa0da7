"""The command of a program that runs in a fork (`forks`): it ends as the fork does.

It imports little, to start at once.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    path, *arguments = sys.argv[1:]
    order = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    content = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(content).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(content)
        fork = int.from_bytes(server.recv(4), "big")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(fork, number))
        code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
