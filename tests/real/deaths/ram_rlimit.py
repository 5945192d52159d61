"""RLIMIT_AS refuses an allocation: MemoryError."""

import resource

resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
held = []
while True:
    held.append(bytearray(32 << 20))
