"""What is worth saying about a box, most dangerous first.

Covers: turning a Box into findings; each has a stable code, the numbers behind it and the fix for this place.
Does not cover: reading the box (probe), predicting a workload (later verbs), printing (cli).

Pure: the same Box gives the same findings. The rules live in rules_*.py, one file a memory; a rule yields
nothing where its numbers are unknown, because an unknown is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from legroom.budget import rules_gpu, rules_machine, rules_ram, rules_shm
from legroom.model import Box, Finding

_ORDER = {"critical": 0, "warning": 1, "info": 2}

Rule = Callable[[Box], Iterator[Finding]]
RULES: tuple[Rule, ...] = (*rules_shm.RULES, *rules_ram.RULES, *rules_gpu.RULES, *rules_machine.RULES)


def findings(box: Box) -> tuple[Finding, ...]:
    """Everything worth saying about the box, most dangerous first; equals stay in the rules' order."""
    said = [finding for rule in RULES for finding in rule(box)]
    return tuple(sorted(said, key=lambda finding: _ORDER[finding.severity]))
