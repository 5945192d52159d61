"""np.memmap on a full disk: the file has its length but no blocks on the disk, bus error."""

import os

import numpy as np

features = np.memmap(os.path.join(os.environ["DEATH_DISK"], "features.dat"), np.float32, "w+", shape=(100, 1 << 20))
for step in range(100):
    print(f"step {step}", flush=True)
    features[step] = step
