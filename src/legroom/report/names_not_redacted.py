"""Names and words that are not hidden in a bundle, although they look private or are someone's login name. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final


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
