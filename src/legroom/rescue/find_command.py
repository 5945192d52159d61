"""Find the program that a command names; where it cannot be run, say why and what to type instead.

The usual reason is a command line that only a shell understands: a builtin, a variable in front, `&&`, quotes around
the whole.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from glob import has_magic
from pathlib import Path

from legroom.errors import CommandNotFound, CommandNotRunnable, UsageError
from legroom.messages import say

# Of POSIX sh and bash, those that a user may type before a training command and that are no programs.
_BUILTINS = frozenset(
    (".", "alias", "bg", "builtin", "cd", "declare", "eval", "exec", "exit", "export", "local", "popd", "pushd", "set",
     "shopt", "source", "trap", "ulimit", "umask", "unset")
)  # fmt: skip
_SETS_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_SHELL_SYNTAX = re.compile(r"&&|[|;<>&$`]")


def find_command(word: str) -> str:
    """The path of that command; raises if it cannot be run."""
    found = shutil.which(word)
    if found is not None:
        return found
    try:
        os.stat(word)
    except PermissionError as problem:
        raise CommandNotRunnable(
            say("cannot run {word}", word=word),
            why=str(problem.strerror),
            fix=(say("check its permissions:\nls -l {path}", path=shlex.quote(word)),),
        ) from problem
    except (OSError, ValueError):
        raise _not_found(word) from None
    if os.path.isdir(word):
        raise CommandNotRunnable(
            say("cannot run {word}", word=word),
            why=say("it is a directory"),
            fix=(say("name the program or script in it that you want to run"),),
        )
    fix = say("make it executable with chmod +x, or name its interpreter:\nlegroom run -- python {word} …",
              word=shlex.quote(word))  # fmt: skip
    raise CommandNotRunnable(say("cannot run {word}", word=word), why=say("it is not executable"), fix=(fix,))


def _not_found(word: str) -> CommandNotFound:
    words = word.split()
    if _SETS_VARIABLE.match(word):
        why = say("it sets an environment variable, which only a shell can do there")
        fix = say("set the variable before legroom, or with env:\nlegroom run -- env {word} …", word=shlex.quote(word))
    elif len(words) > 1 and _SHELL_SYNTAX.search(word):
        why = say("it is a line for a shell, and no shell reads it")
        fix = say("start a shell:\nlegroom run -- bash -c {word}", word=shlex.quote(word))
    elif len(words) > 1 and shutil.which(words[0]) is not None:
        why = say("the whole command is one quoted word")
        fix = say("remove the quotes:\nlegroom run -- {command}", command=word)
    elif word in _BUILTINS:
        why = say("it is a command of the shell, not a program")
        fix = say("type it before legroom, or start a shell:\nlegroom run -- bash -c '{word} … && python …'", word=word)
    else:
        why = say("it is not a file and not in any directory of PATH")
        fix = say("check the spelling or give its path. The command comes after --:\nlegroom run -- python …")
    return CommandNotFound(say("command not found: {word}", word=word), why=why, fix=(fix,))


def refuse_expanded_pattern(option: str, value: str | None, word: str) -> None:
    """Refuse a pattern that the shell has replaced by its files: the first is the value, the others the command."""
    if value is None or has_magic(value) or Path(value).suffix != Path(word).suffix or shutil.which(word) is not None:
        return
    if os.path.exists(value) and os.path.exists(word):
        pattern = str(Path(value).parent / f"*{Path(value).suffix}")
        raise UsageError(
            say("{option} was given the file {value}, and {word} would be the command", option=option, value=value,
                word=word),
            why=say("without quotes, the shell replaces a pattern by the files that match"),
            fix=(say("put the pattern in quotes: {option} '{pattern}'", option=option, pattern=pattern),),
        )  # fmt: skip
