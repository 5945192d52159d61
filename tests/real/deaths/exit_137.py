"""A program that exits with 137 by itself."""

import sys

print("nothing to do", flush=True)
sys.exit(137)
