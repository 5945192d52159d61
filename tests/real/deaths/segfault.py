"""A crash in native code."""

import ctypes

print("epoch 1", flush=True)
ctypes.string_at(0)
