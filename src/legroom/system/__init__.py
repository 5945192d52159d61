"""What several packages need of the operating system and of Python. Imports nothing above errors, words and units.

- arguments: check a caller's argument, and raise UsageError with its name, its range and the value
- atomic_file: replace a file as a whole
- cpus: CPUs this process may run on
- imports: import a module at first use; import an optional package
- libc: calls of the C library
- processes: signal names, and how a child process ended
"""
