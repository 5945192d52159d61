"""The disk has no free inode for another small file."""

import os

for step in range(100):
    print(f"step {step}", flush=True)
    with open(os.path.join(os.environ["DEATH_DISK"], f"sample{step}.txt"), "w") as file:
        file.write("x")
