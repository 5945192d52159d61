"""A child fails, with a status of its own."""

import subprocess

subprocess.run(["sh", "-c", "echo 'config.yaml: no such key' >&2; exit 3"], check=True)
