"""A process opens more files than its limit."""

import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [open("/dev/null") for _ in range(200)]  # noqa: SIM115
