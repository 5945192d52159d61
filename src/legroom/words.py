"""Sentences for people: a template and its numbers become text here and nowhere else.

Covers: filling templates. Does not cover: choosing what to say (budget, errors) or laying it out (cli).

Messages are templates with named fields, never f-strings, so that one place can hand them to a
translation catalogue without touching the code that decides what is said.
"""

from __future__ import annotations


def say(template: str, **values: object) -> str:
    """Fill a message template: ``say("{free} left", free="3 MB")``."""
    return template.format(**values) if values else template
