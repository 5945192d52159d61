"""What several packages need of the operating system and of Python.

- argument_checks: check an argument; UsageError with its name, its range and the value
- atomic_file: write a file as a whole
- child_processes: signal names, how a child process ended, die with the parent, be the OOM killer's first choice
- cpus: CPUs that this process may run on
- imports: import a module at first use; import an optional package
- libc: calls of the C library
"""
