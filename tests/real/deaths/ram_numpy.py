"""An array larger than any machine's memory: numpy's own error."""

import numpy as np

print("building the table", flush=True)
np.ones((1 << 24, 1 << 24), dtype=np.float64)
