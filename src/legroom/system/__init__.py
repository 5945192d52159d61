"""What several packages need of the operating system and of Python.

- argument_checks: check an argument; UsageError with its name, its range and the value
- atomic_file: write a file as a whole
- lazy_and_optional_imports: import a module at first use; import an optional package
- process_control: LEGROOM_DISABLE, usable CPUs, signals, how a child ended, calls of the C library
- thread_limits: whether limits leave room for one more thread; start one, or why that is not possible
- unix_sockets: sockets in a private folder, for processes of one user
- step_callbacks: `legroom.step` reports a training step; callbacks are called at each
"""
