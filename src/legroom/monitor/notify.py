"""Sends alarms to a command, a webhook or a function, when they begin, get worse or end.

A command gets the alarm as JSON on stdin and its main fields in the environment. A webhook gets the same JSON, with a
``text`` that chat services show. Sending never delays the watch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlsplit

from legroom.errors import UsageError
from legroom.messages import say
from legroom.records.finding_and_alarm import Alarm, heading
from legroom.records.watch_sample import Moment
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import ExitStatus, start_daemon_thread, why_no_thread

SCHEMA = "legroom.alarm/1"
_COMMAND_TIMEOUT = 60.0
_WEBHOOK_TIMEOUT = 10.0
_MOST_WAITING = 100
_LAST_WAIT = 5.0  # seconds for unsent alarms when the watch ends

State = Literal["begun", "ended"]
Send = Callable[[Alarm, State], None]


class Notifier:
    """Calls ``send`` for each alarm in its own thread. An error is reported, and the watch continues.

    Where no thread can be started, the watch waits for each alarm to be sent.
    """

    def __init__(self, send: Send, report: Callable[[str], object]) -> None:
        self._send, self._report = send, report
        self._queue: queue.Queue[tuple[Alarm, State] | None] = queue.Queue(_MOST_WAITING)
        self._thread = start_daemon_thread(self._work, "legroom-notify")
        if self._thread is None:
            report(say("readings wait while an alarm is sent: {why}", why=why_no_thread()))

    def show(self, moment: Moment) -> None:
        for alarm in moment.begun:
            self._put((alarm, "begun"))
        for alarm in moment.ended:
            self._put((alarm, "ended"))

    def close(self) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=_LAST_WAIT)
        except queue.Full:
            return  # the receiver hangs; do not keep the process from ending
        self._thread.join(_LAST_WAIT)

    def _put(self, item: tuple[Alarm, State]) -> None:
        if self._thread is None:
            self._send_one(item)
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:  # the receiver hangs; the log has every alarm
            pass

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._send_one(item)

    def _send_one(self, item: tuple[Alarm, State]) -> None:
        try:
            self._send(*item)
        except Exception as problem:
            self._report(say("could not send {code}: {problem}", code=item[0].code, problem=problem))


def command_sender(command: str) -> Send:
    """Run a shell command for each alarm."""
    if not command.strip():
        raise UsageError(
            say("the command for alarms is empty"), fix=(say("pass a command, such as 'notify-send legroom'"),)
        )

    def send(alarm: Alarm, state: State) -> None:
        environment = {
            **os.environ,
            "LEGROOM_ALARM_STATE": state,
            "LEGROOM_ALARM_CODE": alarm.code,
            "LEGROOM_ALARM_LEVEL": alarm.level,
            "LEGROOM_ALARM_POOL": alarm.pool or "",
            "LEGROOM_ALARM_MESSAGE": alarm.message,
            "LEGROOM_ALARM_PIDS": " ".join(map(str, alarm.pids)),
        }
        # The user wrote the command, so a shell may run it. The alarm's text never becomes part of it.
        done = subprocess.run(
            command,
            shell=True,
            env=environment,
            input=json.dumps(_alarm_message(alarm, state)),
            text=True,
            timeout=_COMMAND_TIMEOUT,
            stdout=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(
                say("{command!r} failed: {how}", command=command, how=str(ExitStatus.of(done.returncode)))
            )

    return send


def webhook_sender(url: str) -> Send:
    """Post each alarm to that address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            say("cannot post to {url!r}", url=url),
            why=say("a webhook must be an http or https address"),
            fix=(say("write it like https://example.org/hook"),),
        )

    def send(alarm: Alarm, state: State) -> None:
        with import_lock:
            import urllib.error
            import urllib.request  # imports many network modules

        body = json.dumps(_alarm_message(alarm, state)).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT):
                pass
        except urllib.error.HTTPError as problem:
            problem.close()
            raise RuntimeError(say("{url} answered {status}", url=url, status=problem.code)) from problem

    return send


def function_sender(call: Callable[[Alarm], object]) -> Send:
    """Call a function with each alarm that begins."""

    def send(alarm: Alarm, state: State) -> None:
        if state == "begun":
            call(alarm)

    return send


def _alarm_message(alarm: Alarm, state: State) -> dict[str, Any]:
    word = heading(alarm.level) if state == "begun" else say("ended")
    text = f"legroom: {word} {alarm.code}: {alarm.message}"
    return {"schema": SCHEMA, "state": state, "text": text, **asdict(alarm)}
