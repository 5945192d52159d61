"""No sentence for people is written past `say()` and `phrase()`: one that is could be said in English alone.

Covers: string literals of the package that read like a sentence, four words in a row. Does not cover: single words and
fragments, which cannot be told from names and values.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PO = Path(__file__).parents[2] / "po"
SOURCE = PO.parent / "src" / "legroom"
_FIELD = "\0"  # a field of an f-string: no word
_SENTENCE = re.compile(r"(?<![\w&|(\[])(?:[A-Za-z][a-z']*[,;:]? ){3}[a-z']+(?![\w(])")
# For developers, not for users: plain exceptions, and the detail of a file that its own checksum, schema or format rules
# out.
_FOR_PROGRAMMERS = frozenset(
    {
        *("AttributeError", "AssertionError", "NotImplementedError", "ValueError", "InvalidRecord", "add_argument"),
        *("damaged", "_damaged", "hdf5_errors", "arrow_errors", "_zarr_errors"),
    }
)

# A file, or a file and how a literal in it begins; and why that is no sentence of ours to translate.
ALLOWED = {
    "rescue/failure_message_patterns.py": "patterns of what other programs write",
    "rescue/find_failures_in_log.py": "patterns of what Python writes",
    "rescue/log_lines_without_failure.py": "patterns of what other programs write",
    "report/redact.py: root user": "common names, which are not private",
    "report/redact.py: h5 hdf5": "suffixes of data files",
    "records/loader_settings_and_flags.py: micro_batch_size": "names of options of training scripts",
    "monitor/prometheus.py": "help of Prometheus metrics, the same in every scrape",
    "formats/base_reader.py: \x00 of \x00 is a": "misuse of a reader, by a developer",
    "formats/fill_output_arrays.py: cannot read \x00 into": "misuse of a reader, by a developer",
    "formats/plugin_formats.py": "what the developer of a package did wrong",
    "formats/unsupported_file_types.py: import numpy, scipy": "Python code, the same in every language",
    "testing/__init__.py": "for developers of readers",
    "testing/format_contract.py": "for developers of readers",
    "formats/hdf5_open.py: unable to lock file": "HDF5's words",
    "formats/hdf5_open.py: flag values don't match": "HDF5's words",
    "cache/find_or_build_entry.py: can't start new thread": "Python's words",
    "loader/dataloader/sharing/start_producer_process.py: import os": "a program",
    "cache/manifest.py": "fields of a manifest whose checksum is right: a defect of its writer",
    "loader/dataloader/explain_start_failure.py: batch_size should be": "torch's words",
    "loader/dataloader/explain_start_failure.py: num_workers option should be": "torch's words",
    "loader/dataloader/explain_start_failure.py: prefetch_factor option could": "torch's words",
    "loader/dataloader/explain_start_failure.py: sampler option is mutually": "torch's words",
    "loader/dataloader/explain_start_failure.py: timeout option should": "torch's words",
    "loader/dataloader/explain_start_failure.py: prefetch_factor option should be": "torch's words",
    "loader/dataloader/explain_start_failure.py: multiprocessing_context": "torch's words",
    "loader/dataloader/explain_start_failure.py: drop_last should": "torch's words",
    "loader/dataloader/explain_start_failure.py: batch_sampler option is": "torch's words",
    "loader/dataloader/explain_start_failure.py: expected unspecified": "torch's words",
    "loader/measure/dataloader_trial.py: too many open files": "the system's words",
    "loader/measure/dataloader_trial.py: no space left on device": "the system's words",
    "loader/measure/dataloader_trial.py: unable to": "torch's words",
    "loader/shared_model_weights.py: no other process has the copy": "for this module alone",
    "cache/cached_arrays_and_tables.py: The given NumPy array": "torch's warning, to be silenced",
    "monitor/tui.py: \nScreen {": "a style sheet",
    "rescue/inject/sitecustomize.py: legroom: ": "said where legroom itself could not be imported",
}


@pytest.fixture
def extract(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the tool takes for a message, so that both agree on it."""
    monkeypatch.syspath_prepend(str(PO))
    import extract

    yield extract
    sys.modules.pop("extract", None)


def _bare(tree: ast.Module, extract: Any) -> Iterator[tuple[int, str]]:
    """Literals that read like a sentence and are neither said, nor marked, nor docstrings or help."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            if extract.name_of(node.func) in _FOR_PROGRAMMERS:
                continue
            said = extract.marks(node.func) in extract.MARKS
            is_option = extract.name_of(node.func) == "option"
            keywords = [one.value for one in node.keywords if not (is_option and one.arg == "help")]
            waiting += [node.func, *node.args[1 if said else 0 :], *keywords]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            text = _text(node)
            if _SENTENCE.search(text):
                yield node.lineno, text
            if isinstance(node, ast.JoinedStr):
                waiting += [part for part in node.values if not isinstance(part, ast.Constant)]
        else:
            waiting += ast.iter_child_nodes(node)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else _FIELD for part in node.values)


def test_every_sentence_can_be_translated(extract: Any) -> None:
    found, used = [], set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for line, text in _bare(ast.parse(path.read_text(encoding="utf-8")), extract):
            reasons = [key for key in ALLOWED if f"{name}: {text}".startswith(key)]
            used.update(reasons)
            if not reasons:
                found.append(f"src/legroom/{name}:{line}: {text!r}")
    assert found == [], "say() them where they are shown, or mark them with phrase() where a table holds them"
    assert set(ALLOWED) == used, f"no longer there: {set(ALLOWED) - used}"


@pytest.mark.parametrize(
    "source",
    [
        "raise NoRoom('there is no room here')",
        "raise NoRoom(say('a'), why='the disk is nearly full', fix=())",
        "raise NoRoom(say('a'), fix=('remove what is old', 'b'))",
        "raise NoRoom(f'{path} is in use by {pid}, and stays')",
        "click.echo('nothing has been found here')",
        "Finding('code', 'info', say('a'), 'the machine has no swap')",
        "Alarm('code', 'ram', 'info', f'{share} of it are in use now')",
        "say('{why}', why='the file is too old')",
        "voice.say('this is not ours to say')",
        "TABLE = {'a': 'the reason is not known'}",
        "f(f'{g(\"there is no such file\")}')",
    ],
)
def test_the_guard_sees_a_bare_sentence(source: str, extract: Any) -> None:
    assert len(list(_bare(ast.parse(source), extract))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "say('there is no room here', x=1)",
        "TABLE = {'a': phrase('the reason is not known')}",
        "messages.say('all is well here' if x else 'all is not well here')",
        "def f():\n    '''All of this is documentation.'''",
        "@click.option('--x', help='found by the tool itself')\ndef f(): pass",
        "raise AttributeError(f'module {name} has no such attribute')",
        "run('pip install legroom[torch]')",
        "f'{a} {b} {c} {d} {e}'",
    ],
)
def test_the_guard_lets_pass_what_is_no_bare_sentence(source: str, extract: Any) -> None:
    assert list(_bare(ast.parse(source), extract)) == []


# Library modules raise with arguments of Python, and cli/options.py makes options of them. These have no Python
# interface: only a command reaches them, or what they advise is an option of another program.
ONLY_COMMANDS = (
    "cli/", "demo/", "report/", "rescue/", "monitor/notify.py", "monitor/process_selection.py", "monitor/tui.py",
)  # fmt: skip
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(r"\n.*|(?:legroom|pip|ray|python|git|tar|curl) [^;,()]*")  # to be typed into a shell


def _advice(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that errors give as what to do."""
    for node in ast.walk(tree):
        for argument in node.keywords if isinstance(node, ast.Call) else ():
            if argument.arg in ("fix", "instead"):
                for part in ast.walk(argument.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, part.value


def test_errors_of_the_library_do_not_advise_options_of_commands() -> None:
    found, read = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith(ONLY_COMMANDS):
            continue
        for line, text in _advice(ast.parse(path.read_text(encoding="utf-8"))):
            read += 1
            if _OPTION.search(_COMMAND.sub("", text)):
                found.append(f"{name}:{line}: {text}")
    assert found == []
    assert read > 300


def test_advice_of_commands_is_no_python() -> None:
    found = [
        f"{path.name}:{line}: {text}"
        for path in sorted((SOURCE / "cli").glob("*.py"))
        for line, text in _advice(ast.parse(path.read_text(encoding="utf-8")))
        if re.search(r"(?<![\w-])[a-z]\w*=(?!=)|legroom\.\w+\(", text)
    ]
    assert found == []
