"""Whose requests a page answers, by the host they name. Covers: the Host header.

A page elsewhere can point its own name at this address and so read, from the person's own browser, what is served
here. Such a request carries that page's name. A number cannot be pointed elsewhere, so any address in figures will
do; of names only this machine's own and the one that was asked to be served under.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from functools import cached_property

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class Names:
    """What is answered when bound to a host."""

    def __init__(self, bound: str, full_name: Callable[[], str] = socket.getfqdn) -> None:
        self._full_name = full_name
        self._local = _is_loopback(bound)
        self._names = _LOCAL if self._local else _LOCAL | {bound.lower(), socket.gethostname().lower()}

    def answer(self, header: str | None) -> bool:
        """Whether a request with that Host header may be answered."""
        name = host_in(header)
        if name in self._names:
            return True
        return not self._local and (_is_address(name) or name == self._full)

    @cached_property
    def _full(self) -> str:
        return (
            self._full_name().lower()
        )  # asks a name server, which can take seconds: so only when it matters


def host_in(header: str | None) -> str:
    """The host of a Host header, without its port."""
    name = (header or "").strip().lower()
    if not name.endswith("]"):
        head, colon, port = name.rpartition(":")
        name = head if colon and port.isdecimal() else name
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
