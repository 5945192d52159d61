"""Collects what a bug report needs: this machine, the end of each file that the user adds, and which names are private.

Private things are included: redact.py hides them later. Private names are users, hosts, home directories and values of
secret variables, read where the machine keeps them.

The files that the probes read are recorded, so that `legroom doctor --root` reads the same machine elsewhere; processes
are not. What cannot be read is listed and left out: a report is needed most where things are broken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from legroom.advice.choose_settings import safe_settings
from legroom.advice.findings import findings
from legroom.errors import DamagedSource, LegroomError, UnreadableSource
from legroom.messages import language, say
from legroom.monitor.watch_log import REPEATED
from legroom.monitor.watch_log import SCHEMA as WATCH
from legroom.probe.host_files_and_syscalls import DiskSpace, Host
from legroom.probe.process_and_limits import SOCKET_TAIL, temporary
from legroom.probe.runtime_environment import SUDO_GROUPS, in_initial_namespace
from legroom.probe.snapshot import snapshot
from legroom.records.cache_entry import Entry
from legroom.records.failure import Evidence
from legroom.records.machine import Machine
from legroom.report.bundle import Attachments, Collected, Part
from legroom.report.redact import SECRET_NAME, Identities, shape_of
from legroom.rescue.read_log_file import read_log
from legroom.rescue.verdict import classify, verdict_object, with_fixes
from legroom.system.lazy_and_optional_imports import package_version
from legroom.version import VERSION

MACHINE = "machine"  # directory of the recording
_MOST = 200  # files of /dev/shm, entries, arrays of an entry
_MOST_PROCESSES = 40
# A fixed list: other packages that are installed are private.
_PACKAGES = (
    "accelerate", "blake3", "click", "datasets", "deepspeed", "deflate", "fsspec", "h5py", "hdf5plugin", "isal",
    "lightning", "matplotlib", "mpi4py", "numpy", "nvidia-ml-py", "pandas", "pillow", "prometheus-client",
    "psutil", "pyarrow", "pytorch-lightning", "ray", "rich", "safetensors", "textual", "tokenizers", "torch",
    "torchaudio", "torchdata", "torchvision", "transformers", "triton", "webdataset", "xxhash", "zarr",
)  # fmt: skip


def collect(attachments: Attachments, host: Host | None = None) -> Collected:
    """Every part that can be read; an error only where an attachment cannot be read."""
    recorder = RecordingHost.of(host or Host())
    machine = snapshot(recorder)
    left_out: list[str] = []
    found: list[Entry] = []
    parts = [
        Part(
            "box.json",
            say("resources, limits, environment and findings, as legroom doctor --json prints them"),
            machine_object(machine),
        ),
        *attached_parts(attachments, machine),
        Part("versions.json", say("versions of Python, the kernel and packages"), versions(), addresses=False),
        Part("settings.json", say("environment variables LEGROOM_*"), settings(recorder.env)),
    ]
    if recorder.live:
        try:
            parts.append(Part("cache.json", say("entries of the shared cache"), _cache(found)))
        except (LegroomError, OSError) as problem:
            why = problem.what if isinstance(problem, LegroomError) else problem.strerror or str(problem)
            left_out.append(say("{name}: {why}", name="cache.json", why=why))
    for path, text in recorder.tree().items():
        parts.append(Part(MACHINE + path, say("file read by the probes"), text, addresses=path != "/recording.json"))
    sources = tuple(source for entry in found for source in entry.sources)
    return Collected(tuple(parts), tuple(left_out), sources)


def machine_object(machine: Machine) -> dict[str, Any]:
    """The machine as JSON: only processes that hold memory, and command lines without values."""
    whole = dataclasses.asdict(machine)
    whole["place"] = whole.pop("runtime")  # its name in JSON, as in `doctor --json`
    holding = [row for row in machine.processes if row.shm or row.gpu or row.locked or row.pinned]
    largest = sorted(machine.processes, key=lambda row: -(row.rss or 0))
    wanted = list({row.pid: row for row in (*holding, *largest)}.values())[:_MOST_PROCESSES]
    whole["processes"] = [{**dataclasses.asdict(row), "command": shape_of(row.command)} for row in wanted]
    whole["processes_in_all"] = len(machine.processes)
    files = whole["shm"]["files"]
    whole["shm"]["files_in_all"] = len(files)
    # Names that programs generate are harmless; others may be private.
    whole["shm"]["files"] = [{**file, "name": "other"} if file["kind"] == "other" else file for file in files[:_MOST]]
    for card in whole["gpus"]["cards"]:
        for user in card["processes"] or ():
            user["command"] = None if user["command"] is None else shape_of(user["command"])
    said = [dataclasses.asdict(finding) for finding in findings(machine)]
    rows = [dataclasses.asdict(row) for row in safe_settings(machine)]
    return {"schema": "legroom.report.box/1", **whole, "findings": said, "settings": rows}


def versions() -> dict[str, Any]:
    """What is installed, by its metadata; nothing is imported."""
    packages = {name: package_version(name) for name in _PACKAGES}
    return {
        "legroom": VERSION,
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": sys.platform,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "kernel": platform.release() or None,
        "language": language(),
        "packages": {name: version for name, version in packages.items() if version is not None},
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Legroom; the value of one that is named like a secret is hidden."""
    ours = {name: environment[name] for name in environment if name.startswith("LEGROOM_")}
    return {name: "<secret>" if SECRET_NAME.fullmatch(name) else ours[name] for name in sorted(ours)}


def _cache(found: list[Entry]) -> dict[str, Any]:
    from legroom.cache.list_and_verify import entries, store_rooms

    found += entries(with_users=True)
    rooms, passed_over = store_rooms()
    return {
        "entries": [_entry(entry) for entry in found[-_MOST:]],
        "entries_in_all": len(found),
        "stores": [dataclasses.asdict(room) for room in rooms],
        "findings": [dataclasses.asdict(finding) for finding in passed_over],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    """An entry without its attributes, which are texts of the dataset."""
    whole = dataclasses.asdict(entry)
    whole.pop("attributes")
    for kind in ("arrays", "tables"):
        whole[kind] = dict(list(whole[kind].items())[:_MOST])
        for item in whole[kind].values():
            item.pop("attributes")
    for user in whole["users"] or ():
        user["command"] = shape_of(user["command"])
    return whole


# The recording.

LONGEST = 128 << 10  # characters of one file: mounts of a machine with a thousand containers
_RECORDED_FILES = (
    "/proc/meminfo", "/proc/vmstat", "/proc/swaps", "/proc/pressure/", "/proc/sys/", "/proc/self/cgroup",
    "/proc/self/mountinfo", "/proc/self/status", "/proc/self/limits", "/sys/fs/cgroup/",
)  # fmt: skip
_PRIVATE = ("/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/proc/sys/kernel/random/")
# Files of which a probe only checks whether they exist.
_MARKERS = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
_MOUNTED = "/sys/fs/cgroup"
# Variables that show where this runs; only whether they are set is recorded.
_SET = (
    "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "WSL_DISTRO_NAME", "APPTAINER_CONTAINER", "APPTAINER_NAME",
    "SINGULARITY_CONTAINER", "SINGULARITY_NAME",
)  # fmt: skip
_RECORDED_VARIABLES = ("container", "HOME", "XDG_CACHE_HOME", "SLURM_TMPDIR", "LEGROOM_DIR", "CUDA_VISIBLE_DEVICES")


@dataclass
class RecordedAnswers:
    """What the probes read and what the system answered."""

    files: dict[str, str] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    rooms: dict[str, DiskSpace] = field(default_factory=dict)
    owners: dict[str, tuple[int, int]] = field(default_factory=dict)
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)


Answer = TypeVar("Answer")


def _noted(answers: dict[str, Answer], key: str, answer: Answer | None) -> Answer | None:
    """The answer, kept if there is one."""
    if answer is not None:
        answers[key] = answer
    return answer


@dataclass(frozen=True)
class RecordingHost(Host):
    """A host that records what is read from it."""

    answers: RecordedAnswers = field(default_factory=RecordedAnswers)

    @classmethod
    def of(cls, host: Host) -> RecordingHost:
        """That host, recorded."""
        return cls(root=host.root, env=host.env, platform=host.platform, recording=host.recording)

    def text(self, path: str) -> str | None:
        found = super().text(path)
        if found is not None and path.startswith(_RECORDED_FILES) and not path.startswith(_PRIVATE):
            self.answers.files[path] = found[:LONGEST]
        return found

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found and path.startswith((*_MARKERS, _MOUNTED)):
            self.answers.there.add(path)
        return found

    def disk_space(self, path: str) -> DiskSpace | None:
        return _noted(self.answers.rooms, path, super().disk_space(path))

    def owner_mode(self, path: str) -> tuple[int, int] | None:
        return _noted(self.answers.owners, path, super().owner_mode(path))

    def rlimit(self, name: str) -> tuple[int, int] | None:
        return _noted(self.answers.rlimits, name, super().rlimit(name))

    def tree(self) -> dict[str, str]:
        """The recording: the text of each path, with ``recording.json``."""
        # A recording has no namespaces, by which a leftover of an image is told from a running container.
        leftovers = _MARKERS if in_initial_namespace(self, "pid") else ()
        there = {path for path in self.answers.there if path not in leftovers and not self.path(path).is_dir()}
        empty = dict.fromkeys(there, "")
        # A directory for temporary files counts only where it exists.
        short = dict.fromkeys(self._temporary().values(), "")
        files = dict(sorted({**empty, **short, **self.answers.files}.items()))
        return {**files, "/recording.json": json.dumps(self._answers(), ensure_ascii=False, indent=1)}

    def _answers(self) -> dict[str, Any]:
        return {
            "env": _environment(self.env) | self._temporary(),
            "platform": self.platform,
            "uid": self.uid,
            "groups": sorted(self.groups & SUDO_GROUPS),
            "affinity": self.affinity,
            "kernel": self.kernel,
            "now": self.now,
            "cwd": _here() if self.live else (self.recording or {}).get("cwd"),
            "rlimits": {name: list(pair) for name, pair in self.answers.rlimits.items()},
            "statvfs": {path: list(room) for path, room in self.answers.rooms.items()},
            "stat": {path: [mode, uid] for path, (uid, mode) in self.answers.owners.items()},
        }

    def _temporary(self) -> dict[str, str]:
        """The variable that names the directory for temporary files, with another path of the same length."""
        found = temporary(self)
        if found is None or found.socket - SOCKET_TAIL < 2:
            return {}
        return {found.source: _path_of(found.socket - SOCKET_TAIL)}


def _path_of(length: int) -> str:
    """A meaningless path of that many bytes, at least two; no name in it is too long for a file system."""
    return (("/" + "x" * 99) * (length // 100 + 1))[: length - 1] + "x"


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile
        return None


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: "set" for name in _SET if env.get(name)} | {
        name: env[name] for name in _RECORDED_VARIABLES if env.get(name)
    }


LOG_END = 256 << 10  # bytes
_WATCH_END = 8 << 20
_LARGEST_RUN = 64 << 20
_MOST_ALARMS = 50
_MOST_READINGS = 60  # of an attempt: its last minute or more
_MOST_ATTEMPTS = 20
_RUN = "legroom.run/1"


def attached_parts(attachments: Attachments, machine: Machine) -> Iterator[Part]:
    """The parts from these files; an error where one of them is something else."""
    if attachments.log is not None:
        end = log_end(_end(attachments.log, LOG_END))  # refuses a pipe, which could not be read twice
        evidence = Evidence(log=read_log(attachments.log))
        verdict = with_fixes(classify(evidence), evidence, machine)
        yield Part("explain.json", say("diagnosis of the failure, from the log"), verdict_object(verdict))
        yield Part("training.log", say("the end of the training log"), end)
    if attachments.run is not None:
        yield Part("run.json", say("the report of legroom run"), run_report(attachments.run))
    if attachments.watch is not None:
        yield Part("watch.json", say("the last alarms and the last reading of the watch"), watch_end(attachments.watch))


def log_end(data: bytes) -> str:
    """Whole lines: half of a name at the beginning would not be recognized."""
    text = data.decode("utf-8", "replace")
    if len(data) < LOG_END:
        return text
    first = re.search(r"[\r\n]", text) or re.search(r"\s", text)
    return text[first.end() :] if first is not None else ""


def run_report(path: str) -> dict[str, Any]:
    """The report of a run with the last readings of each attempt."""
    try:
        found = json.loads(_end(path, _LARGEST_RUN))
        if not isinstance(found, dict) or found.get("schema") != _RUN:
            raise ValueError(_RUN)
    except (ValueError, RecursionError) as problem:
        raise DamagedSource(
            say("{path} is not the report of a run", path=path),
            why=say("it is not a JSON object with schema {schema}", schema=_RUN),
            fix=(say("pass the .json file that legroom run --report wrote"),),
        ) from problem
    attempts = found.get("attempts")
    for attempt in attempts if isinstance(attempts, list) else ():
        if isinstance(attempt, dict) and isinstance(attempt.get("readings"), list):
            attempt["readings"] = attempt["readings"][-_MOST_READINGS:]
    if isinstance(attempts, list):
        found["attempts"] = attempts[-_MOST_ATTEMPTS:]
    return found


def watch_end(path: str) -> dict[str, Any]:
    """The last alarms of a watch, each once, and the last sample."""
    alarms: dict[str, Any] = {}
    last: dict[str, Any] | None = None
    # By name or pid, and clock: lines that have the same list or process leave it out.
    lists: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for line in _end(path, _WATCH_END).split(b"\n"):
        try:
            moment = json.loads(line)
        except (ValueError, RecursionError):
            continue  # incomplete, at either end
        if not isinstance(moment, dict) or moment.get("schema") != WATCH:
            continue
        last = moment
        clock = moment.get("clock")
        lists |= {f"{name} {clock}": moment[name] for name in REPEATED if moment.get(name)}
        rows |= {f"{row.get('pid')} {clock}": row for row in _rows(moment) if "unchanged_since" not in row}
        for alarm in moment.get("alarms") or ():
            if isinstance(alarm, dict):
                key = json.dumps([alarm.get("code"), alarm.get("pool"), alarm.get("since")])
                alarms.pop(key, None)
                alarms[key] = alarm  # its newest state, in the order of these
    if last is None:
        raise DamagedSource(
            say("{path} is not the log of a watch", path=path),
            why=say("its last lines have no JSON object with schema {schema}", schema=WATCH),
            fix=(say("pass a file that legroom watch --log wrote"),),
        )
    unchanged = last.pop("unchanged_since", None)
    if isinstance(unchanged, dict):
        last |= {name: lists.get(f"{name} {clock}") for name, clock in unchanged.items() if name in REPEATED}
    last["processes"] = [rows.get(f"{row.get('pid')} {row.get('unchanged_since')}", row) for row in _rows(last)]
    for row in last["processes"]:
        if isinstance(row.get("command"), str):
            row["command"] = shape_of(row["command"])
    return {"alarms": list(alarms.values())[-_MOST_ALARMS:], "last": last}


def _rows(moment: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes in a line of a watch's log."""
    found = moment.get("processes")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _end(path: str, keep: int) -> bytes:
    """The last bytes of a file."""
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise ValueError(say("not a regular file"))  # opening a FIFO waits for a writer, and a device has no end
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - keep))
            return file.read(keep)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UnreadableSource(
            say("cannot read {path}", path=path), why=why, fix=(say("pass a file that you can read"),)
        ) from problem


_FIRST_PERSON = 1000  # lower user ids belong to services
_MOST_USERS = 5000
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "LNAME", "SLURM_JOB_USER")
_HOST_VARIABLES = (
    "HOSTNAME",
    "COMPUTERNAME",
    "MASTER_ADDR",
    "SLURMD_NODENAME",
    "SLURM_SUBMIT_HOST",
    "HOST",
    "NODE_NAME",
)
_SYSTEM = ("/root", "/nonexistent", "/var/", "/usr/", "/dev/", "/run/", "/bin", "/sbin", "/proc", "/etc/")


def identities(host: Host, files: Iterable[str] = ()) -> Identities:
    """The private names that this machine knows; ``files`` are paths of data files."""
    homes_by_user = dict(_users(host))
    users = {name for name in homes_by_user if name} | {host.env.get(name, "") for name in _USER_VARIABLES}
    homes = {home for name, home in homes_by_user.items() if _is_personal(home, name)}
    return Identities(
        users=frozenset(users - {""}),
        hosts=frozenset(_hosts(host)),
        homes=frozenset(homes),
        files=frozenset(re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in files) - {""},
        secrets=frozenset(_secrets(host.env)),
    )


def _users(host: Host) -> Iterator[tuple[str, str]]:
    """(name, home directory) of every user who is a person, and of the user who runs this."""
    for line in (host.text("/etc/passwd") or "").splitlines()[:_MOST_USERS]:
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal():
            uid = int(fields[2])
            if (uid >= _FIRST_PERSON and fields[0] != "nobody") or uid == host.uid:
                yield fields[0], fields[5]
    home = host.env.get("HOME") or host.env.get("USERPROFILE")
    name = next((host.env[one] for one in _USER_VARIABLES if host.env.get(one)), "")
    if home:
        yield name or re.split(r"[/\\]", home.rstrip("/\\"))[-1], home
    if host.live and name == "":
        # A directory service may know what /etc/passwd does not.
        try:
            import pwd

            entry = pwd.getpwuid(os.geteuid())
        except (ImportError, KeyError):
            return
        yield entry.pw_name, entry.pw_dir


def _is_personal(home: str, name: str) -> bool:
    """Whether the whole path has to be hidden: it is a person's, and does not contain the person's name."""
    deep = len([part for part in re.split(r"[/\\]", home) if part]) >= 2
    return deep and not (home + "/").startswith(_SYSTEM) and name.casefold() not in home.casefold()


def _hosts(host: Host) -> Iterator[str]:
    names = [host.env.get(name, "") for name in _HOST_VARIABLES]
    names += [host.text("/etc/hostname") or "", host.text("/proc/sys/kernel/hostname") or ""]
    if host.live:
        names.append(socket.gethostname())
    for name in names:
        whole = name.strip()
        if whole and not whole.replace(".", "").isdigit():
            yield whole
            yield whole.partition(".")[0]


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        # Paths under such names are settings (SSH_AUTH_SOCK, *_KEY_FILE); names in them are hidden as in any path.
        if SECRET_NAME.fullmatch(name) and len(value) >= 6 and not value.startswith("/"):
            yield value
