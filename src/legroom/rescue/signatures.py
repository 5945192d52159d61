"""What programs write when memory fails them: one table.

Covers: the texts of Python, numpy, torch (1.x to 2.13), CUDA, HIP, NCCL, shells, schedulers and the kernel, each with
the code that the rules reason with. Does not cover: what follows from them (classify.py), finding them (log_reader.py).

Patterns are tried on one line, in this order, and the first that fits names the line: what is specific comes first.
"""

from __future__ import annotations

import re

# Files that only ever lie in /dev/shm: torch's, Python's SharedMemory and its heaps, semaphores, NCCL's.
_SHM_FILE = r"(?:/dev/shm|/torch_\d|/psm_|/wnsm_|pym-\d|/mp-|/sem\.|nccl-\w{6})"
_NO_SPACE = r"(?:No space left on device|\bENOSPC\b)"
_PINNED_CALL = (
    r"(?:cudaHostAlloc|cudaHostRegister|cudaMallocHost|hipHostMalloc|CachingHostAllocator|cuMemHostAlloc)"
)
_WORKER = r"worker \(pid\(?s?\)? ?[\d, ]+\) (?:is|was) killed by signal: "
_SHELL = r"^(?:\S+: (?:line )?\d+:? +\d+ )?"  # what bash puts before its word on a signal

# (code, patterns). A code may come twice where another has to be tried between.
_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The kernel's own words, or a scheduler's or a daemon's about them.
    ("oom-kill", (
        r"(?:Memory cgroup out of memory|Out of memory(?: \(\w+\))?): Kill(?:ed)? process \d+",
        r"oom-kill:constraint=CONSTRAINT_",
        r"invoked oom-killer:",
        r"[Dd]etected \d+ oom[-_]kill event",
        r"\bOOMKilled\b|OOM Killed",
        r"Exceeded (?:job|step) memory limit",
    )),
    ("oom-daemon", (
        r"systemd-oomd.*Killed|Killed \S+ due to memory (?:pressure|used)",
        r"earlyoom.*sending SIG(?:TERM|KILL)|sending SIG(?:TERM|KILL) to process \d+ .*badness",
        r"The node (?:was|had) low on resource: memory",
        r"ray\.exceptions\.OutOfMemoryError|killed due to (?:the node running low on memory|memory pressure)",
    )),
    # Pinned memory, before CUDA's own: the same words, in other hands.
    ("pinned", (
        rf"(?i:{_PINNED_CALL}.*(?:out of memory|OutOfMemory|failed|memory allocation))",
        r"(?i:(?:failed to|cannot|could not|unable to) (?:allocate|pin).{0,40}pinned)",
    )),
    # The thread's name, or a traceback's line that asks for pinned memory.
    ("pin-thread", (r"[Cc]aught \w+ in pin memory thread|_pin_memory_loop|^(?:\[rank\d+\]:)? {2,}.*pin_memory",)),
    ("gpu-oom", (
        r"(?:CUDA|HIP|XPU|MPS backend) out of memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError",
        r"cuda ?[Rr]untime.*out of memory",
        # torch names the error once more, to be looked up, below whatever met it: that is no second witness.
        r"(?<!Search for `)cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory",
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
        r"RESOURCE_EXHAUSTED: Out of memory|NCCL.*Cuda failure.*out of memory",
    )),
    ("cuda-oom-bare", (r"(?:CUDA|HIP) error: out of memory",)),
    # Descriptors, before shared memory: "unable to open shared memory object …: Too many open files".
    ("fds", (
        r"Too many open files|\[Errno 24\]|\bEMFILE\b|\bENFILE\b",
        r"received \d+ items of ancdata|unable to open shared memory object .*\(24\)",
    )),
    ("socket-path", (r"AF_UNIX path too long",)),
    ("shm", (
        r"unable to allocate shared memory ?\(shm\)|insufficient shared memory ?\(shm\)",
        r"workers are out of shared memory|[Oo]ut of shared memory",
        rf"{_NO_SPACE}.*{_SHM_FILE}",
        rf"{_SHM_FILE}.*(?:{_NO_SPACE}|\(28\))",
        r"[Ee]rror while (?:creating|attaching to) shared memory segment",
    )),
    ("worker-bus", (rf"{_WORKER}Bus error", r"[Uu]nexpected bus error encountered in worker")),
    ("bus", (
        r"\b[Bb]us error\b|Signal 7 \(SIGBUS\)|exitcode *: -7\b|<Signals\.SIGBUS|\(SIGBUS\)|died with signal 7",
    )),
    ("disk", (rf"{_NO_SPACE}|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|database or disk is full",)),
    ("disk-write", (
        r"PytorchStreamWriter failed writing",
        r"inline_container\.cc:\d+\] \. (?:unexpected pos|write)",
        r"basic_ios::clear: iostream error",
    )),
    # Host memory that was refused.
    ("ram", (
        r"DefaultCPUAllocator: (?:can't|not enough|failed to) allocate|not enough memory: you tried to allocate",
        r"std::bad_alloc|ArrowMemoryError|ArrayMemoryError|Unable to allocate [\d.]+ [KMGTP]?i?B for an array",
        r"^(?:\[\w+\]:? ?)*(?:\w+\.)*MemoryError\b",
        r"(?:[Cc]annot|unable to|could not) allocate memory|\[Errno 12\]|\bENOMEM\b",
        r"memory allocation of \d+ bytes failed",
        r"\bBudgetTooSmall\b|\[budget-too-small\]",  # our own loader's, before anybody is killed
    )),
    # Workers and children that a signal ended.
    ("worker-killed", (rf"{_WORKER}(?:Killed|Terminated)",)),
    ("worker-crash", (_WORKER,)),
    ("worker-gone", (
        r"worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
        r"A process in the process pool was terminated abruptly|BrokenProcessPool",
        r"process \d+ terminated with signal SIGKILL",
        r"A worker process managed by the executor was unexpectedly terminated",
    )),
    ("child-killed", (
        r"<Signals\.SIGKILL|died with signal 9|Signal 9 \(SIGKILL\)|exitcode *: -9\b",
        r"exit(?:ed)?[ -]?(?:code|status):? ?(?:137|-9)\b|return code(?: =|:)? ?(?:-9|137)\b",
    )),
    ("killed", (rf"{_SHELL}Killed(?:\s|$)", r"^\[\d+\]\s*[+-]?\s*\d* *[Kk]illed\b|zsh: killed")),
    ("terminated", (
        rf"{_SHELL}Terminated(?:\s|$)",
        r"SignalException: .*got signal: 15|Received (?:signal )?SIGTERM",
        r"CANCELLED AT .* DUE TO (?:TIME LIMIT|PREEMPTION)",
    )),
    ("crash", (
        rf"{_SHELL}(?:Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
        r"Fatal Python error: (?:Segmentation fault|Aborted)",
        r"Signal (?:11|6) \(SIG(?:SEGV|ABRT)\)|exitcode *: -(?:11|6)\b",
    )),
    # Progress that stopped: what slow swap looks like from inside.
    ("timeout", (
        r"[Ww]atchdog.*time?d?[ -]?out|collective operation timeout|DataLoader timed out",
        r"TimeoutError|TimeoutExpired|timed out after",
        r"no progress for \d|stalled for \d|[Ss]tep took (?:longer|\d+)",
    )),
    ("swap-hint", (r"(?i:swapping|swap (?:is )?(?:thrash|storm|full)|thrashing)",)),
)  # fmt: skip

SIGNATURES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (code, re.compile("|".join(patterns))) for code, patterns in _TABLE
)

# Errors that are mostly the echo of somebody else's death.
CONSEQUENCE = re.compile(
    r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|EOFError|ChildFailedError|CalledProcessError"
    r"|ProcessExitedException|ProcessRaisedException|exited unexpectedly|BrokenProcessPool|terminated abruptly"
    r"|DistBackendError|DistNetworkError|NCCL|Gloo|Connection (?:closed|reset) by peer|died (?:with|of)"
)

# One cheap test for the many lines that say nothing, before the table is tried. Every pattern above has one of these.
_INTERESTING = re.compile(
    r"emory|MEMORY|shm|us error|SIG|oom|OOM|ALLOC|alloc|space left|quota|Errno|E[MN]FILE|ENO|ancdata|open files"
    r"|worker|illed|erminated|Segmentation|Aborted|Illegal instr|Floating point|Fatal Python|xit|return code"
    r"|out|progress|stalled|tep took|[Ss]wap|hrash|Stream|inline_container|stream|RESOURCE|CANCELLED|Signal"
    r"|pin_memory|pool|segment|Memory|Host|\(28\)|nccl|torch_|psm_|/mp-|/sem|signal 7|disk is full|too-small|TooSmall"
    r"|AF_UNIX"
)


def code_of(line: str) -> str | None:
    """What that line is a sign of, or None."""
    if _INTERESTING.search(line) is None:
        return None
    return next((code for code, pattern in SIGNATURES if pattern.search(line)), None)
