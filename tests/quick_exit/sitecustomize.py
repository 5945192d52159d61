"""Lets a Python process end without a last garbage collection; tests/conftest.py puts it on PYTHONPATH.

With torch imported the last collections take 0.4 to 0.7 s of CPU, a third as long as the import. Unregistering torch's
operators takes 0.04 s more, also in a fork, where it copies 32 MB. Exit hooks and the other finalizers run as ever.
Tests of what happens at exit use the fixture ``ordinary_exit``.
"""

import atexit
import gc
import weakref


def _leave_operators() -> None:
    """Each ``torch.library.Library`` has a finalizer, which would otherwise run at exit."""
    for finalizer, call in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if getattr(call.func, "__module__", None) == "torch.library":
            finalizer.atexit = False


atexit.register(gc.freeze)  # registered first, so it runs after all other hooks
weakref.finalize(_leave_operators, int).detach()  # the first finalizer registers the hook that runs all of them
atexit.register(_leave_operators)  # registered after that hook, so it runs before it
