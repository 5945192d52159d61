"""Patterns for the messages that programs, schedulers and kernels print on a failure: one table.

Covers Python, numpy, torch, CUDA, HIP, NCCL, TensorFlow, JAX, Ray, vLLM, shells, Slurm, LSF, PBS, SGE, Kubernetes and
Windows. Each pattern has a code that the verdict rules use. Patterns are tried on one line in this order and the first
match gives its code, so specific ones come first.
"""

from __future__ import annotations

import re

# Errors about shared memory that are not about free space: permissions, missing or existing files.
_NOT_ROOM = (
    r"(?:No such file or directory|Permission denied|Operation not permitted|File exists|Invalid argument"
    r"|Function not implemented|Read-only file system|\((?:1|2|13|17|22|30|38)\)\s*$)"
)

# Files that exist only in /dev/shm: torch's, Python's SharedMemory and heaps, semaphores, NCCL's.
_SHM_FILE = r"(?:/dev/shm|</?torch_\d|/torch_\d|/psm_|/wnsm_|pym-\d|/mp-|/sem\.|nccl-\w{6}|SemLock|sem_open|shm_open)"

_NO_SPACE = (
    r"(?:[Nn]o space left on device|\bENOSPC\b|\[Errno 28\]|errno ?[=:] ?28\b|\(os error 28\)|\[WinError 112\]"
    r"|设备上没有空间|设备空间不足|磁盘空间不足|not enough space on the disk)"
)

_NO_MEMORY = (
    r"(?:(?i:(?:cannot|can't|unable to|could not|failed to) allocate memory)|\[Errno 12\]|\bENOMEM\b"
    r"|errno ?[=:] ?12\b|\(os error 12\)|无法分配内存)"
)

_TRY_AGAIN = r"(?:Resource temporarily unavailable|资源暂时不可用|\bEAGAIN\b|\[Errno 11\])"

_PINNED_CALL = (
    r"(?:cudaHostAlloc|cudaHostRegister|cudaMallocHost|hipHostMalloc|hipHostAlloc|CachingHostAllocator"
    r"|cuMemHostAlloc|cuMemAllocHost|cuMemHostRegister|HostMalloc)"
)

_CUDA_OOM = r"(?i:out of memory|out_of_memory|OutOfMemory|MemoryAllocation|memory allocation)"

_WORKER = r"worker \(pid\(?s?\)? ?[\d, ]+\) (?:is|was) killed by signal: "

_SHELL = r"^(?:\S+: (?:line )?\d+:? +\d+ )?"  # what bash prints before the name of a signal

_EXIT = r"(?i:exit(?:ed)?|terminated|returned?)[ -]*(?:with )?(?:non-zero )?(?:exit )?(?:code|status)?s?\s*[=:]?\s*\(?"


def _exit(status: str) -> str:
    """`exit code 137`, `exited with status: -9`, `exitcode  : -9`, `return code = -9`, `Exit Status = 137`."""
    return rf"(?<![\w/.'\"-]){_EXIT}(?<![A-Za-z])(?:{status})\b(?![.\d/'\"])"


# (code, patterns). A code may appear twice if another must be tried in between.
_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    # What a launcher does to the remaining ranks, or a program to itself: never a cause.
    ("cleanup", (
        r"forcefully exit+ing via|[Ss]ending process \d+ closing signal SIG(?:TERM|INT|KILL)|sigkill_handler"
        r"|Killing subprocess|Bypassing signal|Terminating process \d+|Waiting up to \d+ seconds for job step",
    )),
    # Advice, or TensorFlow's notice that a library is not needed: nothing has failed.
    ("advice", (
        r"(?i:\b(?:avoid|prevent|protect against|risk of|in case of|(?:if|when) you (?:run|get|hit|see"
        r"|encounter|face)"
        r"|(?:may|might|could|can) (?:cause|lead to|result in|run))\b.{0,80}"
        r"(?:out[ -]of[ -]memory|\bOOM\b|segmentation fault|bus error|\babort))",
        r"Could not load dynamic library|dlerror:|nodes are available: .*Insufficient memory",
    )),
    # Faults of a GPU kernel, a driver or a device, and limits that only sound like memory.
    ("fault", (
        r"illegal memory access|illegal instruction was encountered|misaligned address|device-side assert(?!ion)"
        r"|unspecified launch failure|the launch timed out|uncorrectable (?:NVLink|ECC)|ECC error|\bNVRM: Xid"
        r"|fallen off the bus",
        r"Driver/library version mismatch|no kernel image is available|invalid device (?:ordinal|function)"
        r"|driver version is insufficient|(?i:all CUDA-capable devices are busy)|no CUDA-capable device"
        r"|CUDA driver initialization failed|Memory access fault by GPU|HSA_STATUS_ERROR_(?!OUT_OF_RES)",
        r"(?:CUDA_ERROR|cudaError|hipError)_?(?:Illegal|ILLEGAL|Launch|LAUNCH|Assert|ASSERT|ECC|Misaligned"
        r"|MISALIGNED)",
        # On-chip memory of a GPU kernel: depends on block sizes.
        r"out of resource: (?:shared memory|threads|registers|tensor memory)|OutOfResources:"
        r"|too many resources requested"
        r"|uses too much shared (?:data|memory)",
        r"double free or corruption|corrupted (?:size vs|double-linked|unsorted)|free\(\): invalid"
        r"|malloc\(\): (?!fail)"
        r"|munmap_chunk|stack smashing detected",
    )),
    # Limits and libraries with messages like those of memory or disks; often only warnings.
    ("library", (
        r"in static TLS block|write\+execute memory|MDB_MAP_FULL|inotify (?:instance|watch)|inotify_\w+"
        rf"|\bibv_\w+.*{_NO_MEMORY}|RLIMIT_MEMLOCK",  # locked memory
        r"symbol lookup error|undefined symbol|version `?GLIBC"
        r"|cannot open shared object file(?!: (?:Too many|Cannot alloc))",
        r"(?i:/sys/fs/cgroup\S*.*no space left|session key.*quota exceeded)",
    )),
    ("assertion", (r"\bAssertion .{1,200}\bfailed\b",)),
    # A size that no program requests: garbage after another failure.
    ("absurd-size", (r"[Tt]ried to allocate (?:more than )?[\d.]+ ?[EZY]i?B",)),
    # OOM kills as the kernel, a scheduler or a daemon reports them.
    ("oom-kill", (
        r"(?:Memory cgroup out of memory|Out of memory(?: \(\w+\))?): Kill(?:ed)? process \d+",
        r"oom-kill:constraint=CONSTRAINT_|invoked oom-killer:|oom_reaper: reaped process",
        r"[Dd]etected \d+ oom[-_ ]kill event|\bOOMKilled\b(?!\"?\s*[:=]\s*\"?(?:[Ff]alse|0))|OOM Killed"
        r"|[Kk]illed by the OOM killer|result 'oom-kill'",
        r"(?i:exceed(?:ed|s|ing) (?:(?:its|the|job|step|virtual|physical|requested|allocated|container|cgroup) )*"
        r"memory (?:limit|request|allocation))",
        r"task \d+(?:[-,]\d+)*: Out Of Memory|\bOUT_OF_ME\+"
        r"|(?i:\bstate|reason)[:= ]+\"?(?:OUT_OF_ME|OutOfMemory)|\bOUT_OF_MEMORY\b.*\b0:125\b",
        r"TERM_(?:MEM|SWAP)LIMIT|TERM_SWAP\b|reaching LSF (?:memory|swap) usage limit",
        r"job killed: (?:p?v?mem|memsw)\b|\b(?:p?v?mem|memsw) \d+\S* exceeded limit|[Cc]group mem(?:sw"
        r"|ory)? limit exceeded",
        r"(?:enforced|exceed(?:s|ed)?)\b.{0,60}\b[hs]_(?:vmem|rss|data)\b|\b[hs]_(?:vmem|rss|data)\b.{0,60}exceed",
        r"(?i:(?:memory usage|gone over|over) (?:exceeded )?(?:its |the )?(?:cgroup |requested )?memory limit)"
        r"|(?<!GPU )(?<!CUDA )(?i:memory usage exceeded)|running beyond .{0,20}memory limits",
        r"(?i:killed (?:due to|because of|for) (?:its |high |excessive )?memory (?:usage|use|limit))",
        r"(?i:using all available (?:RAM|memory)|tried to allocate more memory than is available)",
        r"instance type with more memory|ran out[ -]of[ -]memory and exited"
        r"|(?i:terminated because it ran out of memory)",
    )),
    ("oom-daemon", (
        r"systemd-oomd.*[Kk]illed|Killed \S+ due to memory (?:pressure|used)",
        r"earlyoom.*sending SIG(?:TERM|KILL)|sending SIG(?:TERM|KILL) to process \d+ .*badness",
        r"low on resource: memory|MemoryPressure.*[Ee]vict|\b(?:Evicted|was evicted)\b.*\bmemory\b",
        r"ray\.exceptions\.OutOfMemoryError|RayOutOfMemoryError|More than \d+% of the memory on node"
        r"|killed due to (?:the node running low on memory|memory pressure)|exceeds the memory usage threshold",
        r"Worker .{0,40}exceeded \d+% memory budget",
    )),
    # Pinned memory, before GPU memory: CUDA uses the same message for both.
    ("pinned", (
        rf"{_PINNED_CALL}.*(?:{_CUDA_OOM}|failed(?!.*(?:invalid|not supported|denied|illegal|already)))",
        rf"{_CUDA_OOM}.*{_PINNED_CALL}",
        r"(?i:(?:failed to|cannot|could not|unable to) (?:alloc(?:ate)?|pin|register|page-lock).{0,60}"
        r"(?:pinned|page-locked|host memory|bytes on host))",
    )),
    # The thread's name, or a traceback line that requests pinned memory.
    ("pin-thread", (
        r"[Cc]aught \w+ in pin memory thread|_pin_memory_loop|_utils/pin_memory\.py"
        r"|^(?:\[rank\d+\]:)? {2,}.*pin_memory",
    )),
    # TensorFlow continues after these, with another algorithm or a smaller block.
    ("gpu-hint", (
        r"caller indicates that this is not a failure|^(?!.*OOM when allocating).*GPU_\d+_bfc"
        r"|Created (?:TensorFlow )?device .*GPU",
    )),
    ("cpu-hint", (r"(?i:falling back to cpu)",)),  # JAX without a GPU
    ("gpu-refused", (r"failed to alloc(?:ate)? .{1,60} from device: .*CUDA_ERROR_OUT_OF_MEMORY",)),
    ("disk-quota", (
        r"(?i:disk quota exceeded|exceeded (?:the |your )?(?:disk |storage |home )quota)|\[Errno 122\]"
        r"|\bEDQUOT\b|超出磁盘限额",
        r"low on resource: ephemeral-storage|ephemeral (?:local )?storage usage exceeds",
        r"database or disk is full",
    )),
    ("disk", (r"(?:Resource exhausted|RESOURCE_EXHAUSTED|ResourceExhaustedError): /(?!job)\S",)),
    ("gpu-oom", (
        r"\b(?:CUDA|HIP|XPU|NPU|HPU|MUSA|MLU|MPS backend) out of memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError|OutOfMemoryError: (?:Allocation on device|CUDA)|bad_alloc.*(?:CUDA"
        r"|cuda)|cupy.*OutOfMemoryError|kIOGPUCommandBufferCallbackErrorOutOfMemory",
        r"(?i:out of memory).{0,40}\b(?:GPU|gpu|HBM|hbm|VRAM)\b|\b(?:GPU|gpu|HBM|hbm|VRAM)\b.{0,60}(?i:out of memory)"
        r"|Ran out of memory in memory space|[Cc]annot allocate .{0,40} on GPU|not enough GPU (?:video )?memory"
        r"|显存不足",
        r"OOM when allocating .*(?:GPU|gpu)|RESOURCE_EXHAUSTED.*(?:GPU|gpu|HBM|hbm|device ordinal)",
        r"No available memory for the cache blocks|KV cache is ?needed, which is larger than the available"
        r"|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|less than desired GPU memory utilization|[Nn]ot enough (?:GPU )?memory.{0,40}(?:KV|kv)[ _]cache",
        r"(?:Cuda failure|NCCL).*'?out of memory|[Ff]ailed to CUDA (?:calloc|malloc)",
        r"(?:cudaMalloc|cuMemAlloc|cuMemCreate|hipMalloc)\w*(?:\(\))?.*(?:failed|retry failed|results? in|error).*"
        + _CUDA_OOM,
        r"[Ee]rror:? out of memory at line \d+ in file .*\.(?:cu|hip|c|cc|cpp)\b|THCStorage\.\w+.*out of memory"
        r"|cuda ?[Rr]untime error \(2\)",
    )),
    ("gpu-likely", (
        # torch repeats the name of the error as a search hint: not a second report.
        r"(?<!Search for `)(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY)",
        r"cudaSuccess.*out of memory|[Cc]uda ?[Rr]untime.*out of memory|error=2 : out of memory",
        r"Attempting to (?:allocate|reserve) [\d.]+[KMGT]i?B?\b.*not possible|No executable batch size found"
        r"|Dst tensor is not initialized|OutOfMemory \(no further information\)",
    )),
    ("cuda-oom-bare", (r"(?:CUDA|HIP|[Cc]uda)(?: driver)? [Ee]rror: out of memory|CUDA.{0,30}out of memory",)),
    ("gpu-library", (
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|CURAND|HIPBLAS|MIOPEN|cublas|cudnn|rocblas|miopen|hipblas)_?"
        r"(?:STATUS|status)?_?\w*(?:ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED|MAPPING_ERROR"
        r"|not_initialized|internal_error|StatusUnknownError)"
        r"|CUFFT_(?:ALLOC|INTERNAL)|[Cc]ould not create cu(?:dnn|blas) handle|Failed to get convolution algorithm"
        r"|[Uu]nable to find (?:a valid cuDNN algorithm|an engine to execute)|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
        r"|(?:CUDA|cuda runtime).{0,16}unknown error|INTERNAL ASSERT FAILED at .*CUDACachingAllocator",
    )),
    # Out of memory on an unnamed device.
    ("device-oom", (
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted|ResourceExhausted\w*).*(?i:out of memory|OOM|allocat)"
        r"|OOM when allocating tensor|BFCArena|BFCAllocator.*(?i:out of memory|failed)",
    )),
    # Descriptors, before shared memory: "unable to open shared memory object …: Too many open files".
    ("fds", (
        r"(?i:too many open files)|打开的文件过多|\[Errno 2[34]\]|\bEMFILE\b|\bENFILE\b|\(os error 2[34]\)",
        r"received \d+ items of ancdata|unable to open shared memory object .*\(24\)"
        r"|accept\(\) out of system resource"
        r"|(?i:too many (?:open )?file descriptors|ran out of file descriptors|file descriptor limit (?:reached"
        r"|exceeded))",
    )),
    ("socket-path", (r"AF_UNIX path too long",)),
    ("shm-other", (
        rf"(?:shared memory (?:segment|object|file)|shm_open|/dev/shm/|shmutils|</?torch_\d).*{_NOT_ROOM}",
        rf"{_NOT_ROOM}.*(?:/dev/shm/|/torch_\d|/psm_)",
        r"Couldn't open shared (?:file mapping|event).*error code: <(?:0|2|5|6|87|183)>",
    )),
    # torch before 1.12 does not name the error; usually it is the number of descriptors.
    ("fds-likely", (r"unable to open shared memory object <[^>]*> in read-write mode(?!:)",)),
    # Mapping an existing file needs no memory: the number of mappings or the address space ran out.
    ("mmap-refused", (rf"unable to mmap \d+ bytes from file <.*{_NO_MEMORY}"
        rf"|[Mm]emory mapping file failed.*{_NO_MEMORY}",)),
    ("map-count", (r"max_map_count|[Mm]ap count (?:limit|exceeded)|[Tt]oo many (?:memory )?mappings",)),
    ("worker-bus", (
        rf"{_WORKER}Bus error", r"(?i:bus error encountered in (?:\w+ )?worker)",
        r"(?:possible that|(?:might|may|could) be caused by).*shared memory",
    )),
    ("shm", (
        r"unable to (?:write to|resize) file </?torch_|unable to allocate shared memory",
        r"insufficient shared memory ?\(shm\)|workers are out of shared memory|[Oo]ut of shared memory",
        rf"{_NO_SPACE}.*{_SHM_FILE}",
        rf"{_SHM_FILE}.*(?:{_NO_SPACE}|\(28\))",
        r"shmutils.*(?:No space left|posix_fallocate)|posix_fallocate failed.*No space left",
        r"[Ff]ailed to (?:allocate|create) (?:\w+ )?(?:shared memory|shm)\b(?!.*(?:denied|exists|such file))"
        r"|[Nn]ot enough (?:shared memory|space in /dev/shm)|EmptyDir volume \"\w*shm\w*\" exceeds",
    )),
    ("shm-likely", (
        r"[Ee]rror while creating shared memory segment|ObjectStoreFullError|(?:shmget|semget).*No space left"
        r"|object store is full(?! and the local disk)|[Pp]lasma.*is full",
    )),
    ("shm-vague", (r"[Ee]rror while attaching to shared memory segment|torch_shm_manager",)),
    # Frames of a traceback: what got "No space left on device", what started a child.
    ("frame-shm", (
        r"_multiprocessing\.SemLock|multiprocessing/(?:synchronize|shared_memory|sharedctypes|heap|queues)\.py"
        r"|multiprocessing\\(?:synchronize|shared_memory|sharedctypes|heap|queues)\.py|_posixshmem|_share_f(?:d"
        r"|ilename)_|_new_shared|_new_using_f|torch/multiprocessing/reductions\.py"
        r"|\bctx\.R?Lock\(\)|joblib will operate in serial mode",
    )),
    ("frame-joblib", (r"joblib[/\\]\w*memmapping|_memmapping_reducer|joblib_memmapping",)),
    ("frame-fork", (r"os\.fork\(\)|_fork_exec\(|_posixsubprocess|popen_fork\.py|start_new_thread\(",)),
    ("frame-peer", (r"multiprocessing[/\\](?:connection|resource_sharer|managers)\.py|SocketClient\(address\)",)),
    ("frame-data", (r"@ +0x[0-9a-f]+ .*(?:basic_string|LMDB|leveldb|Cursor|[Dd]eserialize|Parse|[Rr]ead)",)),
    ("processes", (
        r"(?i:can(?:'t|not) start new thread|thread creation failed|pthread_create(?:\(\))?:? (?:failed|error)"
        r"|unable to create (?:a )?(?:new )?(?:native )?thread|failed to create (?:a )?(?:new )?(?:os "
        r"|worker )?thread"
        r"|blas_thread_init|fork rejected by pids controller|max user processes)",
        rf"(?i:\bfork|thread|clone\b).{{0,60}}{_TRY_AGAIN}|{_TRY_AGAIN}.{{0,40}}(?i:thread|fork)"
        r"|what\(\): +Resource temporarily unavailable|TERM_(?:PROCESS|THREAD)LIMIT",
    )),
    ("try-again", (rf"BlockingIOError.*{_TRY_AGAIN}",)),
    ("bus", (
        r"\b[Bb]us error\b|Signal 7 \(SIGBUS\)|<Signals\.SIGBUS|\bSIGBUS\b|died with signal 7|总线错误|バスエラー"
        r"|Bus-Zugriffsfehler|Erreur du bus",
        _exit("135|-7"),
    )),
    ("disk", (rf"{_NO_SPACE}|(?i:disk (?:is )?full\b)|No usable temporary directory",)),
    ("disk-write", (
        r"PytorchStreamWriter failed writing|\d+ requested and \d+ written",
        r"inline_container\.cc:\d+\] \. (?:unexpected pos|write)",
        r"basic_ios::clear: iostream error",
    )),
    ("disk-io", (r"Input/output error|\[Errno 5\]|\bEIO\b",)),
    # Host memory allocations that failed.
    ("ram", (
        r"DefaultCPUAllocator: (?:can't|not enough|failed to) allocate|not enough memory: you tried to allocate",
        # A library that could not be mapped: no address space, unless execution is not permitted.
        r"failed to map segment from shared object(?!: [Oo]peration not permitted)",
        r"ArrowMemoryError|ArrayMemoryError|[Uu]nable to allocate (?:array|[\d.]+ [KMGTP]?i?B) ",
        r"^(?:\[\w+\]:? ?)*(?:\w+\.)*_?(?:Array)?MemoryError\b|(?<!\w)MemoryError\b",
        r"WinError (?:8|1455)\b|(?:os error |error code: <)1455\b|页面文件太小|(?i:(?:paging"
        r"|page) file is too small)"
        r"|Not enough memory resources|pagination est insuffisant|Auslagerungsdatei ist zu klein"
        r"|paginación es demasiado"
        r"|файл подкачки слишком мал|ページング ファイルが小さすぎ|内存资源不足",
        r"memory allocation of \d+ bytes failed|[Mm]emory allocation still failed|[Ii]nsufficient memory"
        r"|malloc of size \d+ failed"
        r"|virtual memory exhausted|LLVM ERROR: out of memory|C error: out of memory|libgomp: Out of memory",
        r"\bBudgetTooSmall\b|\[budget-too-small\]",  # Legroom's own loader, before any process is killed
    )),
    ("ram-thread", (rf"{_NO_MEMORY} for thread-local data",)),
    ("ram-likely", (
        rf"{_NO_MEMORY}|std::bad_alloc|WinError 1450|heap out of memory|java\.lang\.OutOfMemoryError",
    )),
    # Guesses by programs that do not know the cause.
    ("oom-guess", (
        r"(?i:\b(?:may|might|could|perhaps|possib\w*|potential\w*|probably|likely|maybe)\b.{0,120}"
        r"(?:out of memory|out-of-memory|\bOOM\b|memory))",
    )),
    # Workers and children killed by a signal.
    ("worker-killed", (rf"{_WORKER}(?:Killed|Terminated)",)),
    ("worker-crash", (_WORKER,)),
    ("worker-gone", (
        r"worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
        r"A process in the process pool was terminated abruptly|BrokenProcessPool|KilledWorker",
        r"process \d+ terminated with signal SIGKILL",
        r"A worker process managed by the executor was unexpectedly terminated",
    )),
    # Ended for a reason other than memory: time limits, preemption, a closed terminal.
    ("ended-by", (
        r"DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)|CANCELLED BY|[Cc]ancelled by (?:user|uid)"
        r"|\bPreempted by \w|[Jj]ob was evicted|code=killed, status=15/TERM|[Kk]eyboard interruption",
        r"TERM_(?:RUNLIMIT|OWNER|ADMIN|CPULIMIT|DEADLINE|PREEMPT|REQUEUE|FORCE|WINDOW|BUCKET_KILL|RMS)",
        r"job killed: (?:walltime|cput|ncpus|cpupercent)|(?:walltime|cput) \d+\S* exceeded limit"
        r"|Exceeded .{0,12}walltime"
        r"|exceeded (?:hard|soft) (?:wallclock|cpu) time"
        r"|(?:exceed|enforced).{0,60}\b[hs]_(?:rt|cpu)\b|\b[hs]_(?:rt|cpu)\b.{0,60}exceed",
        r"DeadlineExceeded|active longer than specified deadline|(?i:this job is preempted|job (?:was "
        r"|has been )?preempted"
        r"|preemption notice|spot (?:instance )?interruption)|job (?:was )?deleted by|MaxRuntimeExceeded"
        r"|(?i:max(?:imum)?[ -]?(?:run|wall)[ -]?time (?:was )?(?:exceeded|reached))",
        r"got signal: (?:1|2)\b|(?:closing signal|death signal|[Rr]eceived) (?:Signals\.)?SIG(?:HUP|INT)\b"
        r"|Received (?:1|2) death signal|Received Signals\.SIG(?:HUP|INT) death|^Hangup\b|挂起$",
    )),
    ("child-killed", (
        r"\bSIGKILL\b|died with signal 9|[Ss]ignal:? 9\b|Killed: 9|Signal\s*= KILL|task \d+(?:[-,]\d+)*: Killed",
        _exit("137|-9"),
    )),
    ("killed", (
        rf"{_SHELL}Killed(?:\s|$)", r"^\[\d+\]\s*[+-]?\s*\d* *[Kk]illed\b|zsh: killed|^已杀死|^Getötet|^Tué\b"
        r"|已杀死\s",
    )),
    ("terminated", (
        rf"{_SHELL}Terminated(?:\s|$)|^已终止",
        r"SignalException: .*got signal: 15|Received (?:signal )?SIGTERM|Received (?:15"
        r"|Signals\.SIGTERM) death signal"
        r"|task \d+(?:[-,]\d+)*: Terminated",
        _exit("143|-15"),
        r"CANCELLED AT",
    )),
    ("crash", (
        rf"{_SHELL}(?:Segmentation fault|Illegal instruction|Floating point exception)|[Ss]egmentation fault|段错误"
        r"|Speicherzugriffsfehler|Erreur de segmentation|Violación de segmento",
        r"Fatal Python error: Segmentation fault|\bSIGSEGV\b|\bSIGILL\b|died with signal 11|\(0xC0000005\)"
        r"|access violation",
        _exit("139|-11|3221225477|-1073741819"),
    )),
    ("abort", (
        rf"{_SHELL}Aborted|Fatal Python error: Aborted|\bSIGABRT\b|died with signal 6|已放弃",
        _exit("134|-6|3221226505|-1073740791"),
    )),
    # Progress that stopped: how swap thrashing looks from inside.
    ("timeout", (
        r"[Ww]atchdog.*time?d?[ -]?out|collective operation timeout|DataLoader timed out|checkTimeout"
        r"|ncclCommWatchdog",
        r"TimeoutError|TimeoutExpired|[Tt]imed out (?:after|initializing|waiting)",
        r"no progress for \d|stalled for \d|[Ss]tep took (?:longer|\d+)",
    )),
    ("swap-hint", (r"(?i:swapping|swap (?:is )?(?:thrash|storm|full)|thrashing)",)),
    ("oom-handled", (r"(?i:ran out of memory|OOM detected|skipping (?:this )?batch)",)),
    ("oom-words", (r"(?i:out of memory|out-of-memory|OutOfMemoryError|not enough memory|insufficient memory"
        r"|memory exhausted|invalid buffer size)|内存不足|内存溢出",)),
    # An exit whose cause is elsewhere in the log, or not in it.
    ("gone", (
        r"[Kk]ernel (?:appears to have )?died|[Kk]ernel crashed|The actor is dead|worker died or was killed"
        r"|Pin memory thread exited unexpectedly|Worker unexpectedly exit|did not become healthy",
    )),
)  # fmt: skip

SIGNATURES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    # Bounded: without it, a long line without spaces takes a second.
    (code, re.compile("|".join(f"(?:{pattern})" for pattern in patterns).replace(".*", ".{0,300}")))
    for code, patterns in _TABLE
)

_OF_FRAMES = tuple(row for row in SIGNATURES if row[0].startswith("frame-") or row[0] == "pin-thread")

# Codes that name the pool that ran out.
SHORTAGES: tuple[str, ...] = (
    "oom-kill", "oom-daemon", "pinned", "gpu-oom", "gpu-likely", "cuda-oom-bare", "device-oom", "fds", "fds-likely",
    "mmap-refused", "map-count", "worker-bus", "shm", "shm-likely", "processes", "disk", "disk-quota", "disk-write",
    "ram", "ram-likely", "ram-thread", "oom-handled",
)  # fmt: skip

# Errors that usually report another process's exit.
CONSEQUENCE = re.compile(
    r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|EOFError|ChildFailedError|CalledProcessError"
    r"|ProcessExitedException|ProcessRaisedException|exited unexpectedly|BrokenProcessPool|terminated abruptly"
    r"|DistBackendError|DistNetworkError|DistStoreError|NCCL|Gloo|Connection (?:closed|reset) by peer"
    r"|died (?:with|of)"
    r"|RayActorError|RayTaskError|TuneError|ActorDiedError|WorkerCrashedError|KilledWorker|TerminatedWorkerError"
    r"|See root cause"
    r"|Engine (?:process )?(?:failed|is dead)|EngineDeadError|can only test a child process|^(?:\S* )?Exception:?\s*$"
)

# Every number that a pattern contains: lines that differ only in other numbers have the same code.
NUMBERS = frozenset(re.findall(r"\d+", " ".join(pattern.pattern for _, pattern in SIGNATURES)))


def code_of(line: str) -> str | None:
    """The code of that line, or None."""
    return next((code for code, pattern in SIGNATURES if pattern.search(line)), None)


def frame_code_of(line: str) -> str | None:
    """The code of a source line of a traceback: what it calls counts, what it quotes does not."""
    return next((code for code, pattern in _OF_FRAMES if pattern.search(line)), None)


def start_of(code: str, line: str) -> int:
    """Where in the line the match of that code begins."""
    patterns = (pattern for its_code, pattern in SIGNATURES if its_code == code)
    return min((found.start() for pattern in patterns if (found := pattern.search(line))), default=0)
