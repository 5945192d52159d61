"""Hides what is private in texts, JSON values and command lines; the same thing gets the same new name everywhere.

Private are names that are known (collect.py) and things that look private: addresses, tokens, paths in home
directories, URLs, options with a secret, identifiers, data files. They are found in every reading of a text: as it
stands, and with its escapes undone. Pure: no file and no variable is read here. Some names and words stay, although
they look private or are someone's login name.

First `learn` from everything that will be in the bundle, then redact it. A name that one part has in a path is then
hidden in a sentence of another.
"""

from __future__ import annotations

import ipaddress
import os.path
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names that identify no one, and words that a report needs: a user called "memory" is hidden in a path below /home,
# not in every sentence about memory.
COMMON: Final = frozenset(
    _words(
        "root user users username admin administrator guest nobody daemon test tester runner ubuntu debian "
        "fedora centos vagrant docker podman jovyan ec2-user azureuser opc conda mamba localhost localdomain "
        "host hostname node server client worker master main rank gpu gpus box machine linux darwin "
        "windows microsoft cluster login compute home data dataset datasets train training val model models "
        "work workspace scratch tmp temp shared common proc sys dev shm run var usr bin lib lib64 etc opt mnt "
        "media srv cgroup memory cpu cpuset cpuacct io pids swap max min high low peak stat current events "
        "local pressure limit usage slice scope service session system python python3 torch numpy cuda nvidia "
        "legroom pip venv site-packages true false none null yes no on off unknown self tmpfs overlay ext4 "
        "xfs nfs nfs4 proxy file files name kind size used free source reason"
    )
)
PUBLIC_HOSTS: Final = _words(
    "github.com pytorch.org python.org readthedocs.io huggingface.co nvidia.com kernel.org docker.com kubernetes.io"
)


def harmless(kind: str, value: str) -> bool:
    """Whether something that looks private is not: a common word, a loopback address, a time of day."""
    low = value.casefold().strip()
    if kind == "secret":
        return low.strip("\"'") in ("", "none", "null", "true", "false", "<secret>")
    if kind == "token":
        # Texts about language models are full of token counts.
        return low.isdigit() and len(low) <= 5
    if kind == "email":
        return re.fullmatch(r"user@\d+\.service", low) is not None  # a cgroup of systemd, on every machine
    if kind == "ip":
        try:
            address = ipaddress.ip_address(low)
        except ValueError:  # a time of day has colons too
            return True
        return address.is_loopback or address.is_unspecified or low == "255.255.255.255"
    if kind == "host":
        return (
            low in COMMON
            or low.replace(".", "").isdigit()  # addresses have their own pattern; a number is not a host name
            or any(low == public or low.endswith("." + public) for public in PUBLIC_HOSTS)
        )
    if kind == "user":
        return low in COMMON or low.replace(".", "").isdigit()
    return False


# What private things look like.
# The group ``it`` of a pattern is what is hidden; without one, all of it. Quantifiers are bounded and every pattern
# begins at the edge of a word, so that a megabyte of base64 on one line takes no longer than a megabyte of prose.

_DATA_FILES = (
    "h5 hdf5 he5 npy npz parquet arrow feather orc zarr safetensors pt pth ckpt bin pkl pickle joblib csv tsv jsonl "
    "ndjson tfrecord tfrecords lmdb mdb mat nc nii dcm tar tgz zip zst gz bz2 xz 7z wav flac mp3 ogg mp4 avi mkv jpg "
    "jpeg png tif tiff bmp webp gif onnx gguf msgpack sqlite db xlsx"
).replace(" ", "|")

_SECRET_WORD = (
    r"(?:(?P<token>token)|password|passwd|passphrase|pwd|secret|credentials?|api[_-]?key|apikey|access[_-]?key|private[_-]?key|"
    r"auth|authorization|cookie)"
)
_BEFORE, _AFTER = r"(?:[a-z0-9]{1,32}[_.-]){0,6}", r"(?:[_-][a-z0-9]{1,32}){0,6}"
_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s\0"',;&}\])]+)"""
# Suffixes of host names. Those that attributes of a module have too (net, io, ai) need three parts before them.
_SURE = r"com|org|edu|gov|mil|corp|internal|intranet|lan|example|cluster\.local|ac\.[a-z]{2}|co\.[a-z]{2}|de|fr|cn|jp"
_UNSURE = r"net|io|ai|cloud|uk|ch|kr|dev"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = r"[^\s/?#\"'<>:@\\,;()\[\]{}]{1,253}"

SECRET_NAME: Final = re.compile(
    rf"-{{0,2}}{_BEFORE}(?:{_SECRET_WORD}|key){_AFTER}", re.IGNORECASE
)  # of a variable, a field, an option
SECRET_OPTION: Final = re.compile(rf"--?{_BEFORE}(?:{_SECRET_WORD}|key){_AFTER}", re.IGNORECASE)

_SECRETS = tuple(
    ("secret", re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for pattern in (
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.{0,20000}?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        # scheme://user:password@host; also where the scheme is all that is left of it
        r"://(?P<it>[^\s/?#\"'<>@]{1,512}(?:@[^\s/?#\"'<>@]{1,512}){0,2})@",
        # --token X, --token=X, '--token', 'X'
        rf"(?<![\w-])--?{_BEFORE}(?:{_SECRET_WORD}|key){_AFTER}(?:[\"']\s*,\s*[\"']|\s*=\s*|[\s\0]+)(?P<it>{_VALUE})",
        # token=X, "password": "X", Authorization: Bearer X
        rf"(?<![a-z0-9-]){_BEFORE}{_SECRET_WORD}{_AFTER}[\"']?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?(?P<it>{_VALUE})",
        r"(?<![a-z0-9])(?:bearer|basic)\s+(?P<it>[a-z0-9+/=._~-]{8,})",
        r"(?<![a-z0-9])(?:hf|sk|pk|rk|npm|pypi|glpat|wandb|xox[abprs])[_-][a-z0-9_-]{14,}",
        r"(?<![a-z0-9])(?:gh[pousr]|github_pat)_[a-z0-9_]{16,}",
        r"(?<![a-z0-9])(?:AKIA|ASIA)[a-z0-9]{16}(?![a-z0-9])",
        r"(?<![a-z0-9])AIza[a-z0-9_-]{30,}",
        r"(?<![a-z0-9])eyJ[a-z0-9_-]{8,}\.[a-z0-9_-]{4,}(?:\.[a-z0-9_-]*)?",
    )
)

PATTERNS: Final = _SECRETS + tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("email", r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}"),
        ("user", r"(?:/home/|/users/|\\users\\|\\\\users\\\\)(?P<it>[^/\\\s:\"'<>|,;)(]{1,64})"),
        ("user", r"\\users\\(?P<it>[^/\\:*?\"<>|\r\n]{1,64})(?=\\)"),
        ("user", r"(?<![a-z0-9])[ug]id=\d+\((?P<it>[^)\s]{1,64})\)"),
        ("user", r"(?<![a-z])(?:user(?:_?name)?|logname|login)[\"']?\s*[=:]\s*[\"']?(?P<it>[^\s\0\"',;&:=]{1,64})"),
        ("host", rf"(?<![a-z0-9])[a-z][a-z0-9+.-]{{0,20}}://(?:[^\s/?#\"'<>]{{1,512}}@)?(?P<it>{_HOST})"),
        ("host", rf"(?<![a-z])(?:hostname|host|nodename|master_addr)[\"']?\s*[=:]\s*[\"']?(?P<it>{_HOST})"),
        ("host", r"(?<![a-z])(?:nfs4?|ceph|lustre|beegfs|glusterfs|fuse\.sshfs)\s+(?P<it>[^\s:/@]{1,253}):"),
        ("host", r"(?<![a-z])(?:cifs|smb3|9p)\s+//(?P<it>[^\s/]{1,253})/"),
        ("host", rf"(?<![\w.@-])(?:{_LABEL}\.){{1,6}}(?:{_SURE})(?!\.?[\w-])"),
        ("host", rf"(?<![\w.@-])(?:{_LABEL}\.){{3,6}}(?:{_UNSURE})(?!\.?[\w-])"),
        ("mac", r"(?<![\w:-])(?:[0-9a-f]{2}[:-]){5,19}[0-9a-f]{2}(?![\w:-])"),
        ("mac", r"(?<![\w.])[0-9a-f]{4}\.[0-9a-f]{4}\.[0-9a-f]{4}(?![\w.])"),
        ("ip", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)"),
        ("ip", r"(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?:(?:\.\d{1,3}){3})?(?![\w:])"),
        ("id", r"[0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12}(?![0-9a-f])"),
        ("id", r"(?<![0-9a-z])[0-9a-f]{32,}(?![0-9a-z])"),
        ("id", r"serial(?:[ _]?(?:number|no))?[\"']?\s*[:=]\s*[\"']?(?P<it>[a-z0-9][a-z0-9-]{5,40})"),
        (
            "file",
            # in a URL a path's / is %2F: the name begins behind it
            r"(?:(?<![^\s/\\\"'<>|:*?,;()\[\]{}=&#@])|(?<=%2f)|(?<=%5c)|(?<=%3a))"
            r"(?P<it>(?:[^\s/\\\"'<>|:*?,;()\[\]{}=&#@%]|%(?!2f|5c|3a)){1,250}\.(?:" + _DATA_FILES + r"))(?![a-z0-9])",
        ),
        ("file", r"[\"'](?:[^\"'\n]{0,4000}[/\\])?(?P<it>[^\"'/\\\n]{1,250}\.(?:" + _DATA_FILES + r"))[\"']"),
    )
)


# Hiding it.

SECRET = "<secret>"
_ADDRESSES = frozenset({"ip", "mac"})
_SHORTEST = {"secret": 6, "user": 2, "host": 3, "home": 4, "file": 4}
# A name ends where no letter follows; for file names no digit either: a1.h5 is not in data1.h5.
_LETTER, _LETTER_DIGIT = r"[^\W\d_]", r"[^\W_]"
_DEEPEST = 40  # groups in groups in a pattern: the compiler of patterns is recursive
_EDGES = {"secret": "", "home": _LETTER_DIGIT, "user": _LETTER, "host": _LETTER_DIGIT, "file": _LETTER_DIGIT}


@dataclass(frozen=True, slots=True)
class Identities:
    """Names that are private wherever they stand; collect.py reads them."""

    users: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    homes: frozenset[str] = frozenset()  # home directories without the user's name in them
    files: frozenset[str] = frozenset()  # names of data files, without their directories
    secrets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    end: int
    kind: str
    value: str


@dataclass
class Redactor:
    """Hides what is private; keeps the new name of each thing, and how often each kind was hidden."""

    identities: Identities = field(default_factory=Identities)
    counts: Counter[str] = field(default_factory=Counter)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)  # the last number of each kind
    _learned: dict[str, set[str]] = field(default_factory=dict)
    _literals: dict[str, re.Pattern[str] | None] | None = None

    def learn(self, data: Any) -> None:
        """Note the users, hosts and files that a text or JSON value names."""
        for text in _strings(data):
            for found in _private_in(list(readings(text)), ("user", "host", "file")):
                bare = found.value.strip()
                if bare.casefold() not in COMMON and len(bare) >= _SHORTEST[found.kind] + 1:
                    self._learned.setdefault(found.kind, set()).add(bare)
        self._literals = None

    def text(self, text: str, *, addresses: bool = True) -> str:
        """The text without what is private; ``addresses=False`` for versions like 12.4.5.8."""
        ways = list(readings(text))
        found = [*self._identities_in(ways), *_private_in(ways)]
        if not addresses:
            found = [one for one in found if one.kind not in _ADDRESSES]
        parts: list[str] = []
        passed = 0
        for one in _merged(found):
            new = self._name(one)
            parts += (text[passed : one.start], new)
            if new[-1:].isdigit() and text[one.end : one.end + 1].isdigit():
                parts.append("_")  # user-1 and the 2 of bob2 are not user-12
            passed = one.end
        return "".join((*parts, text[passed:]))

    def value(self, data: Any, *, addresses: bool = True) -> Any:
        """A JSON value without what is private, in keys and values."""
        if isinstance(data, str):
            return self.text(data, addresses=addresses)
        if isinstance(data, dict):
            return {
                self.text(str(name), addresses=addresses): self._secret()
                if isinstance(item, str) and SECRET_NAME.fullmatch(str(name)) and not harmless("secret", item)
                else self.value(item, addresses=addresses)
                for name, item in data.items()
            }
        if isinstance(data, list | tuple):
            before: list[Any] = [None, *data]
            return [
                self._secret()
                if isinstance(last, str) and isinstance(item, str) and SECRET_OPTION.fullmatch(last)
                else self.value(item, addresses=addresses)
                for last, item in zip(before, data, strict=False)
            ]
        return data

    def _secret(self) -> str:
        self.counts["secret"] += 1
        return SECRET

    def _identities_in(self, ways: Sequence[DecodedText]) -> Iterator[_Found]:
        if self._literals is None:
            named = {
                "user": self.identities.users, "host": self.identities.hosts, "home": self.identities.homes,
                "file": self.identities.files, "secret": self.identities.secrets,
            }  # fmt: skip
            self._literals = {
                kind: _any_of(kind, names | self._learned.get(kind, set())) for kind, names in named.items()
            }
        for reading in ways:
            for kind, pattern in self._literals.items():
                if pattern is not None:
                    for match in pattern.finditer(reading.text):
                        yield _Found(*reading.span(*match.span()), kind, match[0])

    def _name(self, found: _Found) -> str:
        if found.kind == "secret":
            return self._secret()
        self.counts[found.kind] += 1
        key = (found.kind, _canonical(found.value))
        if key not in self._names:
            self._numbers[found.kind] += 1
            self._names[key] = f"{found.kind}-{self._numbers[found.kind]}"
            if found.kind == "file":
                self._names[key] += os.path.splitext(key[1])[1]
            elif found.kind == "home":
                self._names[key] = "/" + self._names[key]
        return self._names[key]


def _private_in(ways: Sequence[DecodedText], kinds: Sequence[str] | None = None) -> Iterator[_Found]:
    """What looks private in any reading: of these kinds, or of all."""
    for reading in ways:
        for kind, pattern in PATTERNS:
            if kinds is not None and kind not in kinds:
                continue
            group = "it" if "it" in pattern.groupindex else 0
            for match in pattern.finditer(reading.text):
                count = "token" in pattern.groupindex and match["token"] is not None and harmless("token", match[group])
                if not count and not harmless(kind, match[group]):
                    yield _Found(*reading.span(*match.span(group)), kind, match[group])


def _merged(found: Iterable[_Found]) -> list[_Found]:
    """What was found, in order; what overlaps becomes one: a secret first, then the longest."""
    merged: list[_Found] = []
    for one in sorted(found, key=lambda one: (one.start, -one.end)):
        if one.start == one.end:
            continue
        last = merged[-1] if merged else None
        if last is None or one.start >= last.end:
            merged.append(one)
            continue
        best = max(last, one, key=lambda each: (each.kind == "secret", each.end - each.start))
        merged[-1] = _Found(last.start, max(last.end, one.end), best.kind, best.value)
    return merged


def _any_of(kind: str, names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for any of the names in any case; None where all are too short or too common.

    Host names may be short: a short one is hidden where it is a word of its own.
    """
    spelt: dict[str, None] = {}  # in lower case: the pattern ignores case
    short: set[str] = set()
    for name in names:
        if kind in ("user", "host") and name.casefold() in COMMON:
            continue
        if len(name) < _SHORTEST[kind]:
            if kind == "host" and name:
                short.add(name)
            continue
        cases = (name, name.upper(), name.lower(), name.casefold(), name.title()) if not name.isascii() else (name,)
        forms = {unicodedata.normalize(form, case) for form in ("NFC", "NFD") for case in cases}
        spelt.update(dict.fromkeys(map(_lowered, (*cases, *forms))))
    edge = _EDGES[kind]
    before, after = (f"(?<!{edge})", f"(?!{edge})") if edge else ("", "")
    patterns = [f"{before}(?:{_alternatives(spelt)}){after}"] if spelt else []
    # A host called vm is hidden in "on vm", not in vm.overcommit_memory, /proc/sys/vm and VM.
    patterns += [rf"(?<![\w./\\-])(?-i:{_alternatives(short)})(?![\w/\\-]|\.\w)"] if short else []
    return re.compile("|".join(patterns), re.IGNORECASE) if patterns else None


def _lowered(name: str) -> str:
    """In lower case, character by character, as the pattern compares them; one that becomes several stays."""
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in name)


def _alternatives(names: Iterable[str], depth: int = 0) -> str:
    """A pattern for each of the names, the longest first.

    Names with the same beginning share it, so that thousands of file names cost no more at each place of a text than
    their number of letters.
    """
    if depth == _DEEPEST:
        return "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
    parts = []
    for first, group in groupby(sorted(names, reverse=True), key=lambda name: name[:1]):  # "" is the last
        alike = list(group)
        common = os.path.commonprefix(alike) if first else ""  # noqa: RUF071 - letters, not directories
        rest = _alternatives([name[len(common) :] for name in alike], depth + 1) if len(alike) > 1 else ""
        parts.append(re.escape(common) + (f"(?:{rest})" if rest else ""))
    return "|".join(parts)


def _canonical(value: str) -> str:
    """The same text for every spelling of a name."""
    unescaped = list(readings(value))[-1].text
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", unescaped).upper().casefold())


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for name, item in data.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _strings(item)


# Command lines.

_KEPT = re.compile(r"-{1,2}[A-Za-z][\w.-]*|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SCRIPT = re.compile(r"(?:.*[/\\])?([\w-]+\.py)", re.DOTALL)
_NUMBERED = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)=(-?\d+(?:\.\d+)?)")
_OPTION = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)=.*", re.DOTALL)
_SECRET_OPTION_WORD = re.compile(r"pass|pwd|token|secret|key|auth|pin|code", re.IGNORECASE)
_LONGEST = 40  # words: enough for the options of any training script


def shape_of(command: str) -> str:
    """A command line without its values: ``python train.py --data … --batch 32``. Only what is harmless is kept."""
    words = command.split()
    if not words:
        return command
    kept = [re.split(r"[/\\]", words[0])[-1]]
    kept += [_kept(last, word) for last, word in pairwise(words[:_LONGEST])]
    return " ".join((*kept, "…") if len(words) > _LONGEST else kept)


def _kept(last: str, word: str) -> str:
    if last.startswith("-") and "=" not in last and _SECRET_OPTION_WORD.search(last) and not word.startswith("--"):
        return "…"
    if numbered := _NUMBERED.fullmatch(word):
        return f"{numbered[1]}=…" if _SECRET_OPTION_WORD.search(numbered[1]) else word
    if option := _OPTION.fullmatch(word):
        return f"{option[1]}=…"
    if script := _SCRIPT.fullmatch(word):
        return script[1]
    return word if _KEPT.fullmatch(word) else "…"


# Every way to read a text: as it stands, and with its escapes undone.
# Undone are URL encoding (%2F) and escapes of JSON, Python and mountinfo (\u002f, \/, \x2f, \057), also one inside
# another. C:\bob is a path, or a backspace if it is JSON, so there are several readings, and what is found in any of
# them counts. Each character knows where it stands in the original text.

_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NUMBER = r"\\[uU][0-9A-Fa-f]{4}|\\[xX][0-9A-Fa-f]{2}|\\[0-3][0-7]{2}"
# Runs of escapes: the last kind also right behind a backslash that is one, as in C:\\u00e9.
_RUNS = tuple(re.compile(f"(?:{one})+") for one in (r"%[0-9A-Fa-f]{2}", rf"{_NUMBER}|\\[\\/\"'bfnrtBFNRT]", _NUMBER))
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})|\\([uU][0-9A-Fa-f]{4}|[xX][0-9A-Fa-f]{2}|[0-3][0-7]{2}|.)", re.DOTALL)
_ROUNDS = 3  # JSON in a URL in JSON


@dataclass(frozen=True, slots=True)
class DecodedText:
    """A text read one way; ``at[i]`` is where character i begins in the original, ``at[-1]`` where the text ends."""

    text: str
    at: list[int] | None  # None: as it stands

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where these characters stand in the original."""
        return (start, end) if self.at is None else (self.at[start], self.at[end])


def readings(text: str) -> Iterator[DecodedText]:
    """Every different reading, the text as it stands first."""
    fresh = [DecodedText(text, None)]
    seen = {text}
    yield fresh[0]
    for _ in range(_ROUNDS):
        found: list[DecodedText] = []
        for reading in fresh:
            for pattern in _RUNS:
                other = _unescaped(reading, pattern)
                if other is not None and other.text not in seen:
                    seen.add(other.text)
                    found.append(other)
                    yield other
        fresh = found


def _unescaped(reading: DecodedText, runs: re.Pattern[str]) -> DecodedText | None:
    """The reading with one kind of escape undone; None where it has none."""
    parts: list[str] = []
    at: list[int] = []
    passed = 0
    old = reading.at if reading.at is not None else range(len(reading.text) + 1)
    for match in runs.finditer(reading.text):
        parts.append(reading.text[passed : match.start()])
        at.extend(old[passed : match.start()])
        place = match.start()
        for character, length in _characters(match[0]):
            parts.append(character)
            at.append(old[place])
            place += length
        passed = match.end()
    if not passed:
        return None
    parts.append(reading.text[passed:])
    at.extend(old[passed:])  # one more than characters: the end
    return DecodedText("".join(parts), at)


def _characters(run: str) -> Iterator[tuple[str, int]]:
    """(character, length of its escapes): bytes of UTF-8 are one character, and so are two surrogates."""
    units = [_unit(match) for match in _ESCAPE.finditer(run)]
    at = 0
    while at < len(units):
        count, character = next(
            (size, text) for size in (4, 3, 2, 1) if (text := _character(units[at : at + size], size)) is not None
        )
        yield character, sum(length for _, length in units[at : at + count])
        at += count


def _unit(escape: re.Match[str]) -> tuple[int, int]:
    """(code, length of the escape); a length of 3 or 4 is a byte, of 6 a UTF-16 unit, of 2 a character."""
    byte, other = escape.groups()
    if byte is not None:
        code = int(byte, 16)
    elif len(other) > 1:
        code = int(other, 8) if len(other) == 3 and other.isdecimal() else int(other[1:], 16)
    else:
        code = ord(_SHORT.get(other.lower(), other))
    return code, len(escape[0])


def _character(units: list[tuple[int, int]], size: int) -> str | None:
    """The one character that these escapes are, or None."""
    codes = [code for code, _ in units]
    if size == 1:
        return chr(codes[0])
    if len(codes) == size and all(length in (3, 4) for _, length in units) and codes[0] >= 0x80:
        try:
            text = bytes(codes).decode("utf-8")
            return text if len(text) == 1 else None
        except UnicodeDecodeError:
            return None
    if size == 2 == len(codes) and 0xD800 <= codes[0] < 0xDC00 <= codes[1] < 0xE000:
        return chr(0x10000 + (codes[0] - 0xD800) * 0x400 + codes[1] - 0xDC00)
    return None
