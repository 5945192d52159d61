"""Alarms carried elsewhere: to a command, to a webhook, to a function.

Covers: telling each alarm when it begins (or gets worse) and when it ends, without ever holding up the watch.
Does not cover: which alarms there are (alarms.py).

A command gets the alarm as JSON on its standard input and the main fields in its environment; a webhook gets the
same JSON, with a ``text`` that chat services show.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from legroom.errors import UsageError
from legroom.model import Alarm, Moment
from legroom.model.advice import heading
from legroom.monitor.watch_log import alarm_object
from legroom.words import say

SCHEMA = "legroom.alarm/1"
_COMMAND_TIMEOUT = 60.0
_WEBHOOK_TIMEOUT = 10.0
_MOST_WAITING = 100
_LAST_WAIT = 5.0  # seconds at the end for what is still under way

State = Literal["begun", "ended"]
Send = Callable[[Alarm, State], None]


class Notifier:
    """Hands alarms to ``carry`` in a thread of its own; what goes wrong there is told, and watching goes on."""

    def __init__(self, carry: Send, tell: Callable[[str], object]) -> None:
        self._carry, self._tell = carry, tell
        self._waiting: queue.Queue[tuple[Alarm, State] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="legroom-deliver", daemon=True)
        self._thread.start()

    def show(self, moment: Moment) -> None:
        for alarm in moment.begun:
            self._put((alarm, "begun"))
        for alarm in moment.ended:
            self._put((alarm, "ended"))

    def close(self) -> None:
        try:
            self._waiting.put(None, timeout=_LAST_WAIT)
        except queue.Full:
            return  # whoever takes them hangs, and does not keep the process from ending
        self._thread.join(_LAST_WAIT)

    def _put(self, item: tuple[Alarm, State]) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:  # whoever takes them hangs; the log has them all
            pass

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._carry(*item)
            except Exception as problem:
                self._tell(say("could not tell of {code}: {problem}", code=item[0].code, problem=problem))


def message(alarm: Alarm, state: State) -> dict[str, Any]:
    """An alarm as it is sent."""
    word = heading(alarm.level) if state == "begun" else say("ended")
    text = f"legroom: {word} {alarm.code}: {alarm.message}"
    return {"schema": SCHEMA, "state": state, "text": text, **alarm_object(alarm)}


def command_sender(command: str) -> Send:
    """Run a shell command for each alarm."""
    if not command.strip():
        raise UsageError(
            say("--on-alarm names no command"), fix=(say("give one, such as 'notify-send legroom'"),)
        )

    def carry(alarm: Alarm, state: State) -> None:
        environment = {
            **os.environ,
            "LEGROOM_ALARM_STATE": state,
            "LEGROOM_ALARM_CODE": alarm.code,
            "LEGROOM_ALARM_LEVEL": alarm.level,
            "LEGROOM_ALARM_POOL": alarm.pool or "",
            "LEGROOM_ALARM_MESSAGE": alarm.message,
            "LEGROOM_ALARM_PIDS": " ".join(map(str, alarm.pids)),
        }
        # The command is the watcher's own words, so a shell reads it; what the alarm says never becomes part of it.
        done = subprocess.run(
            command,
            shell=True,
            env=environment,
            input=json.dumps(message(alarm, state)),
            text=True,
            timeout=_COMMAND_TIMEOUT,
            stdout=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(
                say("{command!r} ended with {status}", command=command, status=done.returncode)
            )

    return carry


def webhook_sender(url: str) -> Send:
    """Post each alarm to that address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            say("cannot post to {url!r}", url=url),
            why=say("a webhook is an http or https address"),
            fix=(say("write it like https://example.org/hook"),),
        )

    def carry(alarm: Alarm, state: State) -> None:
        import urllib.error
        import urllib.request  # brings in half of the network modules: not for watches without a webhook

        body = json.dumps(message(alarm, state)).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT):
                pass
        except urllib.error.HTTPError as problem:
            problem.close()
            raise RuntimeError(say("{url} answered {status}", url=url, status=problem.code)) from problem

    return carry
