"""Find DataLoader settings on the command line of a training script, under the names that scripts give their options.

``_FLAG_NAMES`` is the table of spellings: of training scripts, launchers, hydra, Lightning and detectron2. Settings
in files or in code are not found. Flags of a launcher (``torchrun --nproc_per_node 8``) and of the interpreter
(``python -b``) are not the script's: only ranks are read from the words before the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


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
