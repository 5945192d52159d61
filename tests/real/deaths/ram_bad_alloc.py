"""C++ code allocates more than is available: std::bad_alloc, abort."""

import ctypes

new = ctypes.CDLL("libstdc++.so.6")._Znwm
new.argtypes, new.restype = [ctypes.c_size_t], ctypes.c_void_p
print("epoch 1", flush=True)
new(1 << 60)
