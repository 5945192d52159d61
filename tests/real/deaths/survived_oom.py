"""An allocation fails and is handled; a bug ends the program later."""

import traceback

try:
    bytearray(1 << 60)
except MemoryError:
    traceback.print_exc()
for step in range(40):
    print(f"step {step} loss 0.{step}", flush=True)
raise KeyError("label")
