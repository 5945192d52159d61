"""What private things look like where nobody has named them.

Covers: the shapes (addresses, tokens, home directories, URLs, options with a secret, identifiers, data files), and the
words that are no secret however much they look like one. Does not cover: finding and replacing (redact.py).

Each shape's group ``it`` is what goes; without one, all of it. Quantifiers are bounded and every shape begins at the
edge of a word, so that a megabyte of base64 on one line costs no more than a megabyte of prose.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names that say nothing about anybody, and words that a report cannot do without: a user called "memory" is hidden
# in a path below /home, not wherever memory is spoken of.
COMMON: Final = frozenset(
    _words(
        "root user users username admin administrator guest nobody daemon test tester runner ubuntu debian "
        "fedora centos vagrant docker podman jovyan ec2-user azureuser opc conda mamba localhost localdomain "
        "host hostname node server client worker master main rank vm gpu gpus box machine linux darwin "
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

DATA_FILES: Final = _words(
    "h5 hdf5 he5 npy npz parquet arrow feather orc zarr safetensors pt pth ckpt bin pkl pickle joblib csv tsv jsonl "
    "ndjson tfrecord tfrecords lmdb mdb mat nc nii dcm tar tgz zip zst gz bz2 xz 7z wav flac mp3 ogg mp4 avi mkv jpg "
    "jpeg png tif tiff bmp webp gif onnx gguf msgpack sqlite db xlsx"
)

_SECRET_WORD = (
    r"(?:(?P<token>token)|password|passwd|passphrase|pwd|secret|credentials?|api[_-]?key|apikey|access[_-]?key|private[_-]?key|"
    r"auth|authorization|cookie)"
)
_BEFORE, _AFTER = r"(?:[a-z0-9]{1,32}[_.-]){0,6}", r"(?:[_-][a-z0-9]{1,32}){0,6}"
_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s\0"',;&}\])]+)"""
# Endings by which a name is a host's wherever it stands. Those that attributes of a module share (net, io, ai)
# need three parts before them.
_SURE = r"com|org|edu|gov|mil|corp|internal|intranet|lan|example|cluster\.local|ac\.[a-z]{2}|co\.[a-z]{2}|de|fr|cn|jp"
_UNSURE = r"net|io|ai|cloud|uk|ch|kr|dev"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = r"[^\s/?#\"'<>:@\\,;()\[\]{}]{1,253}"

SECRET_NAME: Final = re.compile(
    rf"-{{0,2}}{_BEFORE}(?:{_SECRET_WORD}|key){_AFTER}", re.IGNORECASE
)  # of a variable, a field, an option
SECRET_OPTION: Final = re.compile(rf"--?{_BEFORE}(?:{_SECRET_WORD}|key){_AFTER}", re.IGNORECASE)

SECRETS: Final = tuple(
    re.compile(shape, re.IGNORECASE | re.DOTALL)
    for shape in (
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

SHAPES: Final = tuple(
    (kind, re.compile(shape, re.IGNORECASE))
    for kind, shape in (
        ("email", r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}"),
        ("user", r"(?:/home/|/users/|\\users\\|\\\\users\\\\)(?P<it>[^/\\\s:\"'<>|,;)(]{1,64})"),
        ("user", r"\\users\\(?P<it>[^/\\:*?\"<>|\r\n]{1,64})(?=\\)"),
        ("user", r"(?<![a-z0-9])[ug]id=\d+\((?P<it>[^)\s]{1,64})\)"),
        (
            "user",
            r"(?<![a-z])(?:user(?:_?name)?|logname|login)[\"']?\s*[=:]\s*[\"']?(?P<it>[^\s\0\"',;&:=]{1,64})",
        ),
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
            r"(?P<it>(?:[^\s/\\\"'<>|:*?,;()\[\]{}=&#@%]|%(?!2f|5c|3a)){1,250}\.(?:"
            + "|".join(DATA_FILES)
            + r"))(?![a-z0-9])",
        ),
        (
            "file",
            r"[\"'](?:[^\"'\n]{0,4000}[/\\])?(?P<it>[^\"'/\\\n]{1,250}\.(?:"
            + "|".join(DATA_FILES)
            + r"))[\"']",
        ),
    )
)


def harmless(kind: str, value: str) -> bool:
    """Whether something of that shape is nobody's: a word everybody has, this machine's own loopback, a time."""
    low = value.casefold().strip()
    if kind == "secret":
        return low.strip("\"'") in ("", "none", "null", "true", "false", "<secret>")
    if kind == "token":
        # Texts about language models are full of tokens that are no secrets but counts.
        return low.isdigit() and len(low) <= 5
    if kind == "email":
        return re.fullmatch(r"user@\d+\.service", low) is not None  # systemd's, in every login's cgroup
    if kind == "ip":
        try:
            address = ipaddress.ip_address(low)
        except ValueError:  # the time of day has colons too
            return True
        return address.is_loopback or address.is_unspecified or low == "255.255.255.255"
    if kind == "host":
        return (
            low in COMMON
            or low.replace(".", "").isdigit()  # an address has a shape of its own, an amount is none
            or any(low == public or low.endswith("." + public) for public in PUBLIC_HOSTS)
        )
    if kind == "user":
        return low in COMMON or low.replace(".", "").isdigit()
    return False
