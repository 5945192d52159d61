"""DataLoader settings: one record with torch's argument names, from the command line to the retry policy.

LoaderSettings holds any of them, narrower records are its subclasses. LEGROOM_SETTINGS carries settings to a script in
the environment. `training_flags` finds them on the command line of a training script, under the names that scripts give
their options; settings in files or in code are not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from legroom.errors import UsageError
from legroom.messages import listed, say
from legroom.system.argument_checks import check_choice, check_integer

VARIABLE = "LEGROOM_SETTINGS"
LoaderKind = Literal["torch", "legroom"]  # whose DataLoader


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Settings of a DataLoader and of the training loop around it. None: not given."""

    batch_size: int | None = None  # samples per batch on one rank
    accumulation: int | None = None  # batches per optimizer step
    ranks: int | None = None  # processes that train together
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    low_memory: bool | None = None  # stream or map the data instead of holding them in each process
    threads: int | None = None  # OMP_NUM_THREADS, MKL_NUM_THREADS
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF
    loader_kind: LoaderKind | None = None

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in NAMES}

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in self.values().items() if value is not None}

    def changed(self, other: LoaderSettings) -> LoaderSettings:
        """These settings with those that ``other`` gives."""
        return replace(self, **other.given())


NAMES = tuple(one.name for one in fields(LoaderSettings))


@dataclass(frozen=True, slots=True)
class CompleteLoaderSettings(LoaderSettings):
    """Settings of a DataLoader of which none is open: torch's default where none was given."""

    batch_size: int = 1
    ranks: int = 1
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    loader_kind: LoaderKind = "torch"


@dataclass(frozen=True, slots=True)
class SafeSettings:
    """DataLoader settings that fit in the machine's free memory now, up to a batch size in bytes."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    max_batch_bytes: int | None = None  # None: no limit, or unknown
    known: bool = True  # False: free memory is unknown, and max_batch_bytes with it
    bound_by: str = "none"  # the memory pool that limits it
    why: str = ""
    pin_why: str = ""


_COUNTS = {"batch_size": 1, "accumulation": 1, "ranks": 1, "num_workers": 0, "prefetch_factor": 1, "threads": 1}
_SWITCHES = ("persistent_workers", "pin_memory", "low_memory")
_SWITCH_WORDS = {**dict.fromkeys(("on", "true", "yes", "1"), True), **dict.fromkeys(("off", "false", "no", "0"), False)}
_CHOICES = {"loader_kind": ("torch", "legroom")}
ALIASES = {"workers": "num_workers", "prefetch": "prefetch_factor", "batch": "batch_size", "loader": "loader_kind"}


def to_environment(settings: LoaderSettings) -> str:
    """The settings as the value of LEGROOM_SETTINGS."""
    return json.dumps(settings.given())


def from_environment(environment: Mapping[str, str]) -> LoaderSettings:
    """The settings given in LEGROOM_SETTINGS."""
    text = environment.get(VARIABLE)
    if not text:
        return LoaderSettings()
    try:
        read = json.loads(text)
    except ValueError as problem:
        raise _bad(say("{name} is not JSON: {why}", name=VARIABLE, why=problem)) from None
    if not isinstance(read, dict):
        raise _bad(say("{name} is not a JSON object", name=VARIABLE))
    return read_settings(read)


def read_settings(values: Mapping[str, Any]) -> LoaderSettings:
    """Settings from names, also short ones, and values; UsageError for a name or value that is not valid."""
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = ALIASES.get(given, given)
        if name not in NAMES:
            raise _bad(say("unknown setting {name!r}", name=given))
        found[name] = _checked(name, value)
    return LoaderSettings(**found)


def _checked(name: str, value: Any) -> Any:
    if name in _COUNTS:
        return check_integer(name, value, _COUNTS[name])
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    elif not isinstance(value, bool if name in _SWITCHES else str):
        raise _bad(say("{value!r} is not a valid value for {name}", name=name, value=value))
    return value


def read_word(name: str, text: str) -> Any:
    """A value from a command line: ``2``, ``on``, ``expandable_segments:True``."""
    name = ALIASES.get(name, name)
    if name in _COUNTS:
        try:
            return int(text)
        except ValueError:
            return text
    if name in _SWITCHES:
        return _SWITCH_WORDS.get(text.lower(), text)
    return text


def _bad(what: str) -> UsageError:
    return UsageError(
        what,
        why=say("settings: {names}", names=listed(NAMES)),
        fix=(say("write num_workers=2 on a command line, a JSON object in {name}", name=VARIABLE),),
    )


# Options of training scripts.
#
# _FLAG_NAMES is the table of spellings: of training scripts, launchers, hydra, Lightning and detectron2. Flags of a
# launcher (torchrun --nproc_per_node 8) and of the interpreter (python -b) are not the script's: only ranks are read
# from the words before the script.


class Flag(NamedTuple):
    """One setting as spelled on the command line."""

    spelling: str  # "--batch-size", "data.num_workers"
    value: str
    at: int  # which word it begins in; the value is in the same word or in the next


# In order of preference: of several similar flags, the per-process batch size comes first.
_FLAG_NAMES: dict[str, str] = {
    "batch": """micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size per_device_batch_size
        per_gpu_train_batch_size per_gpu_batch_size batch_size_per_gpu batch_size_per_device samples_per_gpu
        local_batch_size batch_size train_batch_size batch batchsize bs bsz b ims_per_batch global_batch_size
        total_batch_size""",
    "workers": """num_workers dataloader_num_workers train_num_workers num_dataloader_workers workers n_workers
        nworkers nw num_data_workers data_workers loader_workers workers_per_gpu j""",
    "prefetch": "prefetch_factor dataloader_prefetch_factor prefetch",
    "accumulation": """gradient_accumulation_steps accumulation_steps grad_accumulation_steps grad_accum_steps
        accum_steps accumulate_grad_batches accum_iter gradient_accumulation grad_accumulation grad_accum
        accumulation accumulate accum update_freq""",
    "pin_memory": "pin_memory dataloader_pin_memory pin_mem no_pin_memory no_pin_mem",
    "persistent_workers": "persistent_workers dataloader_persistent_workers no_persistent_workers",
    "image_size": "image_size img_size imgsz imsize input_size train_crop_size crop_size resolution img",
    "sequence_length": """max_seq_len max_seq_length max_sequence_length sequence_length seq_length seq_len
        model_max_length max_length context_length block_size cutoff_len""",
    "epochs": "epochs num_epochs n_epochs max_epochs num_train_epochs total_epochs",
}  # fmt: skip

_SWITCH_FLAGS = frozenset({"pin_memory", "persistent_workers"})
_CANONICAL = {name: (key, rank) for key, names in _FLAG_NAMES.items() for rank, name in enumerate(names.split())}
_SHORT_NAMES = frozenset({"-b", "-j"})
_RANK_FLAGS = frozenset({"nproc_per_node", "num_processes", "num_gpus", "ntasks_per_node", "ntasks", "np", "n"})
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*(?:\.exe)?")
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun"})
_LAUNCHER_MODULES = re.compile(r"torch\.distributed\.(?:run|launch)|accelerate\.commands\.\S+|deepspeed\S*")
_TAKES_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_SHORT_FLAG = re.compile(r"-([bj])=?([0-9]+)", re.A)
_LONG_FLAG = re.compile(r"--?([A-Za-z][\w.\-]*)(?:=(.*))?", re.A | re.S)
_ASSIGNED = re.compile(r"[+~]{0,2}([A-Za-z_][\w./@\-]*)=(.*)", re.A | re.S)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+", re.A)
_TRUTH = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f"})


def training_flags(command: Sequence[str]) -> dict[str, Flag]:
    """The settings found on a command line, by canonical name; of one spelling given twice, the last counts."""
    words = list(command)
    if len(words) == 1 and " " in words[0]:  # a process that changed its title leaves one long word
        words = words[0].split()
    launcher, script = _launcher_and_script(words)
    found: dict[str, tuple[int, Flag]] = {}
    for at in script:
        for name, flag in _read_flag(words, at):
            key, rank = _CANONICAL[name]
            if key not in found or rank <= found[key][0]:
                found[key] = (rank, flag)
    settings = {key: found[key][1] for key in _FLAG_NAMES if key in found}
    for at in launcher:
        match = _LONG_FLAG.fullmatch(words[at])
        if match and _plain_name(match[1]) in _RANK_FLAGS:
            value = match[2] if match[2] is not None else _next_word(words, at)
            if value:
                settings["ranks"] = Flag(words[at].partition("=")[0], value, at)
    return settings


def _launcher_and_script(words: Sequence[str]) -> tuple[range, range]:
    """(the launcher's words, the script's words); without a known script, all words after the launcher are both."""
    launched: int | None = None
    at = 0
    while at < len(words):
        name = _base_name(words[at])
        if _PYTHON.fullmatch(name):
            at, run = _after_interpreter(words, at + 1)
            if not (run in _LAUNCHERS or _LAUNCHER_MODULES.fullmatch(run)):
                return range(at if launched is None else launched, at), range(at, len(words))
            launched = at if launched is None else launched
            continue
        if name in _LAUNCHERS:
            launched = at + 1 if launched is None else launched
        elif launched is not None and name.endswith(".py"):
            return range(launched, at), range(at + 1, len(words))
        elif launched is not None and words[at] in ("-m", "--module"):
            return range(launched, at), range(at + 2, len(words))
        at += 1
    if launched is None:
        return range(0), range(1, len(words))
    return range(launched, len(words)), range(launched, len(words))


def _after_interpreter(words: Sequence[str], at: int) -> tuple[int, str]:
    """Skip the interpreter's own options: where the script's words begin, and which script."""
    while at < len(words):
        word = words[at]
        if word in ("-m", "-c"):
            return at + 2, words[at + 1] if word == "-m" and at + 1 < len(words) else ""
        if not word.startswith("-"):
            return at + 1, _base_name(word)
        at += 2 if word in _TAKES_VALUE else 1
    return at, ""


def _base_name(word: str) -> str:
    return word.replace("\\", "/").rpartition("/")[2]


def _read_flag(words: Sequence[str], at: int) -> Iterator[tuple[str, Flag]]:
    """The setting that begins in that word, if any."""
    word = words[at]
    if short := _SHORT_FLAG.fullmatch(word):
        yield short[1], Flag(f"-{short[1]}", short[2], at)
        return
    if match := _LONG_FLAG.fullmatch(word) or _ASSIGNED.fullmatch(word):
        name, value = _plain_name(match[1]), match[2]
    elif _DOTTED.fullmatch(word) and re.fullmatch(r"[0-9]+", _next_word(words, at) or "", re.A):
        name, value = _plain_name(word), None
    else:
        return
    if name not in _CANONICAL or (len(name) == 1 and word.partition("=")[0] not in _SHORT_NAMES):
        return
    spelling = word if match is None or match[2] is None else word[: match.start(2) - 1]
    if _CANONICAL[name][0] in _SWITCH_FLAGS:
        value = _switch_value(name, value, _next_word(words, at))
    elif value is None:
        value = _next_word(words, at)
    if value:
        yield name, Flag(spelling.lstrip("+~"), value, at)


def _switch_value(name: str, value: str | None, following: str | None) -> str:
    """The value of a flag that may stand alone: ``--pin_memory``, ``--no-pin-memory``."""
    if value is None:
        value = following if following is not None and following.lower() in _TRUTH else "true"
    if name.startswith("no_"):
        return "true" if value.lower() in ("false", "no", "off", "0", "n", "f") else "false"
    return value


def _next_word(words: Sequence[str], at: int) -> str | None:
    """The following word, unless it is a flag itself."""
    if at + 1 >= len(words) or re.match(r"--|-[A-Za-z]", words[at + 1]):
        return None
    return words[at + 1]


def _plain_name(text: str) -> str:
    """``data.Num-Workers`` → ``num_workers``."""
    return re.split(r"[./]", text.partition("@")[0])[-1].lower().replace("-", "_")
