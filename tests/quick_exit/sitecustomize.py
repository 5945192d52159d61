"""Lets a Python process end without a last garbage collection; tests/conftest.py puts it on PYTHONPATH.

With torch imported the last collections take 0.4 to 0.7 s of CPU, a third as long as the import. Exit hooks and the
finalizers of what is not part of a cycle run as ever. Tests of what happens at exit use the fixture ``ordinary_exit``.
"""

import atexit
import gc

atexit.register(gc.freeze)  # registered first, so it runs after all other hooks
