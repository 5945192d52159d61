"""Templates are filled in the language that is chosen, and those without fields are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from legroom import messages
from legroom.messages import chosen, joined, known, language, listed, phrase, say, speak


def test_fills_named_fields() -> None:
    assert say("{share:.0%} of {size}", share=0.5, size="64 MB") == "50% of 64 MB"


def test_braces_survive_without_values() -> None:
    assert say("volumes: [{name: shm}]") == "volumes: [{name: shm}]"


def test_a_missing_value_is_an_error_not_a_hole() -> None:
    with pytest.raises(KeyError):
        say("{free} left", size="1 MB")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "zh"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),  # set and empty is not set
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en:zh"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "fr:de"}, "zh"),
        ({"LANG": "C", "LANGUAGE": "zh"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "POSIX", "LANGUAGE": "zh"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANGUAGE": "zh"}, "en"),  # no locale is the C locale
        ({"LEGROOM_LANG": "zh", "LC_ALL": "C"}, "zh"),
        ({"LEGROOM_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LEGROOM_LANG": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LEGROOM_LANG": "fr", "LANG": "zh_CN.UTF-8"}, "zh"),
    ],
)
def test_the_environment_chooses_as_gettext_does(environment: dict[str, str], expected: str) -> None:
    assert chosen(environment) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("zh_CN.GB18030@pinyin", "zh"), ("zh-Hans", "zh"), ("ZH", "zh"), ("en_GB", "en"), ("fr", None), ("", None)],
)
def test_names_of_languages(name: str, expected: str | None) -> None:
    assert known(name) == expected


def test_chinese_with_its_fields() -> None:
    speak("zh")
    assert language() == "zh"
    assert say("{free} of {size} free", free="1 MB", size="64 MB") == "可用 1 MB，共 64 MB"


def test_what_is_not_in_the_catalogue_is_shown_in_english() -> None:
    speak("zh")
    assert say("{count} unheard-of things", count=3) == "3 unheard-of things"
    assert say("") == ""  # which is where a catalogue keeps its header


def test_a_phrase_is_translated_when_it_is_shown() -> None:
    speak("zh")
    assert phrase("unknown") == "unknown" and say(phrase("unknown")) == "未知"


def test_a_language_that_is_not_spoken_is_refused() -> None:
    with pytest.raises(ValueError, match="fr"):
        speak("fr")


def test_the_first_sentence_settles_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_look_up", None)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert say("unknown") == "未知"
    monkeypatch.setenv("LC_ALL", "C")
    assert say("unknown") == "未知"


def test_english_reads_no_catalogue() -> None:
    program = (
        "import sys; from legroom.errors import UsageError; str(UsageError('x', fix=('y',))); "
        "print('gettext' in sys.modules)"
    )
    source = str(Path(messages.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        env={"LC_ALL": "C.UTF-8", "PYTHONPATH": source},
    )
    assert done.stdout.strip() == "False", done.stderr


def test_what_stands_in_a_row_is_parted_as_the_language_parts_it() -> None:
    assert listed(["a", "b"]) == "a, b" and joined(["one", "two"]) == "one; two"
    assert listed([]) == "" and joined(iter(["one"])) == "one"
    speak("zh")
    assert listed(["a", "b"]) == "a、b" and joined(["一", "二"]) == "一；二"
