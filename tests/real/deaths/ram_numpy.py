"""An array that no machine has room for: numpy's own error."""

import numpy as np

print("building the table", flush=True)
np.ones((1 << 24, 1 << 24), dtype=np.float64)
