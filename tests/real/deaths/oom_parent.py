"""The training process exceeds its cgroup's limit."""

print("epoch 1", flush=True)
held = []
while True:
    held.append(bytearray(8 << 20))
