"""The disk is full while a checkpoint is written."""

import os

folder = os.environ["DEATH_DISK"]
for step in range(100):
    print(f"step {step}", flush=True)
    with open(f"{folder}/step{step}.pt", "wb") as file:
        file.write(os.urandom(1 << 20))
