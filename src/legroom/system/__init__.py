"""What several packages need of the operating system and of Python.

- argument_checks: check an argument; UsageError with its name, its range and the value
- atomic_file: write a file as a whole
- file_writes: write all of some bytes at an offset; write through to the disk where memory is short
- lazy_and_optional_imports: import a module at first use; import an optional package
- open_file_or_pipe: open a file that a user names, to read it to its end: no device, no FIFO without a writer
- processes_and_threads: LEGROOM_DISABLE, usable CPUs, signals, how a child ended; start a thread if limits leave room
  for it, or explain why not; calls of the C library
- unix_sockets: sockets in a private folder, for processes of one user
- training_step_listeners: `legroom.step` reports a training step; callbacks are called at each
"""
