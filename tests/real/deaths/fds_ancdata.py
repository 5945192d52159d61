"""Descriptors are sent to a process at its limit: "received 0 items of ancdata"."""

import os
import resource
import socket
from multiprocessing import reduction

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
ours, theirs = socket.socketpair()
file = os.open("/dev/null", os.O_RDONLY)
held = []
while True:
    reduction.sendfds(ours, [file])
    held += reduction.recvfds(theirs, 1)
