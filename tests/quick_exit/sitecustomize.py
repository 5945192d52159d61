"""Lets a Python process end without a last garbage collection; the fixture ``quick_exit`` puts it on PYTHONPATH.

With torch imported the last collections take 0.7 s of CPU, half as long as the import. Exit hooks and the finalizers of
what is not part of a cycle run as ever. Tests of what happens at exit do without it.
"""

import atexit
import gc

atexit.register(gc.freeze)  # registered first, so it runs after all other hooks
