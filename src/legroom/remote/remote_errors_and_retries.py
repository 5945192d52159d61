"""Errors of a remote source in words, and which failed requests are repeated, how often, and with which pauses.

Failures are counted from zero once new bytes have arrived: a connection that is cut again and again, but brings data
each time, is repeated until all of it is there.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

from legroom.errors import (
    AccessDenied,
    LegroomError,
    NoCredentials,
    NoSuchObject,
    RemoteError,
    RemoteTimeout,
    RemoteUnreachable,
    ShortRead,
    SourceChanged,
)
from legroom.messages import say
from legroom.remote.remote_object import ObjectUrl, redacted
from legroom.units import format_size

_TIMEOUTS = ("FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError", "ServerTimeoutError", "SocketTimeoutError")
_CONNECTION = (
    "EndpointConnectionError", "ClientConnectorError", "ClientConnectionError", "ServerDisconnectedError",
    "ConnectionClosedError", "HTTPClientError", "ClientOSError", "ConnectError", "ClientConnectorDNSError",
)  # fmt: skip
_CUT = (
    "ClientPayloadError", "IncompleteReadError", "ResponseStreamingError", "ContentLengthError", "BadStatusLine",
    "LineTooLong",
)  # fmt: skip
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "TokenRetrievalError")
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_LONGEST_TIMEOUT = 1e6  # seconds: sockets take no infinite time
_DENIED = {401, 403, 407}
_LOGIN = {
    "s3": "aws configure", "s3a": "aws configure", "gs": "gcloud auth application-default login",
    "gcs": "gcloud auth application-default login", "hf": "hf auth login",
}  # fmt: skip


def remote_error(url: ObjectUrl, problem: BaseException) -> LegroomError:
    """The error for what fsspec or the library behind it raised. Never has credentials in it."""
    if isinstance(problem, LegroomError):
        return problem
    chain = list(_chain(problem))
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    status = next((number for one in chain if (number := _status(one)) is not None), None)
    reason = _reason(next((one for one in chain if not isinstance(one, FileNotFoundError)), problem))
    what = say("cannot read {path}", path=url)
    if names & set(_CREDENTIALS):
        return NoCredentials(
            what,
            why=say("no credentials for {protocol} were found", protocol=url.protocol),
            fix=(*_login(url), say("credentials are those of fsspec: its environment variables and config files")),
        )
    if status == 412 or any("PreconditionFailed" in str(one) for one in chain):
        return object_changed(url)
    if status in _DENIED or any(isinstance(one, PermissionError) for one in chain):
        return AccessDenied(
            what,
            why=say("the server refused access: {reason}", reason=reason),
            fix=(*_login(url), say("ask the owner for read permission, or check that the signature has not expired")),
        )
    missing = NoSuchObject(what, why=say("the server has no such object or bucket"), fix=(say("check the URL"),))
    if status == 404:
        return missing
    if names & set(_TIMEOUTS) or any(isinstance(one, TimeoutError) for one in chain):
        return RemoteTimeout(
            what,
            why=say("the server sent nothing for {seconds:g} s", seconds=timeout()),
            fix=(say("try again; what has arrived is kept"), "LEGROOM_REMOTE_TIMEOUT=300"),
        )
    if names & set(_CUT):
        return ShortRead(
            what,
            why=say("the connection ended in the middle of the data"),
            fix=(say("try again; what has arrived is kept"),),
        )
    if names & set(_CONNECTION) or any(map(_no_connection, chain)):
        return RemoteUnreachable(
            what,
            why=say("no connection to the server: {reason}", reason=reason),
            fix=(say("check the network, and proxy and endpoint settings; what has arrived is kept"),),
        )
    # Last, because fsspec also raises it where the server cannot be reached or fails.
    if status is None and any(isinstance(one, FileNotFoundError) for one in chain):
        return missing
    return RemoteError(what, why=reason, fix=(say("check the URL and the storage service"),), status=status)


def short_read(url: ObjectUrl, wanted: int, got: int) -> ShortRead:
    """The error for a range that came incomplete."""
    return ShortRead(
        say("cannot read {path}", path=url),
        why=say("the server sent {got} of {wanted}", got=format_size(got), wanted=format_size(wanted)),
        fix=(say("try again; what has arrived is kept"),),
    )


def object_changed(url: ObjectUrl) -> SourceChanged:
    """The error for an object that was replaced while it was read."""
    return SourceChanged(
        say("{path} changed while it was being read", path=url),
        why=say("the server has another version of it now"),
        fix=(say("wait until the object is fully written, then open it again"),),
    )


def timeout() -> float:
    """Seconds without a byte after which a request is given up: LEGROOM_REMOTE_TIMEOUT."""
    found = seconds("LEGROOM_REMOTE_TIMEOUT")
    return min(found, _LONGEST_TIMEOUT) if found > 0 else 60.0


def seconds(variable: str) -> float:
    """The seconds in a variable of the environment, by default 60."""
    try:
        return float(os.environ.get(variable, "") or 60)
    except ValueError:
        return 60.0


def _no_connection(problem: BaseException) -> bool:
    """Whether it says that the server was not reached: a name without an address, or a network without a way to it."""
    if isinstance(problem, (ConnectionError, socket.gaierror)):
        return True
    return isinstance(problem, OSError) and problem.errno in _NO_ROUTE


def _login(url: ObjectUrl) -> tuple[str, ...]:
    return (_LOGIN[url.protocol],) if url.protocol in _LOGIN else ()


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        seen.add(id(problem))
        yield problem
        problem = problem.__cause__ or problem.__context__


def _status(problem: BaseException) -> int | None:
    found = getattr(problem, "status", None) or getattr(problem, "status_code", None) or getattr(problem, "code", None)
    response = getattr(problem, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None and found is None:
        found = getattr(response, "status_code", None)
    return found if type(found) is int else None


def _reason(problem: BaseException) -> str:
    """The library's own first line, without credentials and without parameters that could hold them."""
    text = str(problem).strip().partition("\n")[0]
    return redacted(text) or type(problem).__name__


ATTEMPTS = 6
_MOST_TIMEOUTS = 3  # each takes long by itself
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class CallerFailed(Exception):
    """What was received could not be kept: no fault of the server's."""


def retried(
    attempt: Callable[[], Any],
    as_error: Callable[[Exception], LegroomError],
    progress: Callable[[], int],
    interrupted: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Any:
    """Repeat the attempt with growing pauses. Progress in between starts the count again.

    Args:
        attempt: The request.
        as_error: The error, without credentials, for what a library raised.
        progress: How many bytes have arrived.
        interrupted: Whether the caller has given up.
        sleep: Waits that many seconds.
    """
    failed = timeouts = 0
    while True:
        before = progress()
        try:
            return attempt()
        except CallerFailed:
            raise
        except Exception as raised:
            problem = as_error(raised)
        # Raised outside the handler: what the library raised may have credentials in its text.
        if progress() > before:
            failed = timeouts = 0
        failed += 1
        timeouts += isinstance(problem, RemoteTimeout)
        if interrupted() or not is_transient(problem) or failed >= ATTEMPTS or timeouts >= _MOST_TIMEOUTS:
            raise problem
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failed - 1))
        sleep(pause * random.uniform(0.5, 1.0))


def is_transient(problem: LegroomError) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(problem, (RemoteTimeout, RemoteUnreachable, ShortRead)):
        return True
    return type(problem) is RemoteError and (problem.status is None or problem.status >= 500 or problem.status == 429)
