"""A child process fails with its own exit status."""

import subprocess

subprocess.run(["sh", "-c", "echo 'config.yaml: no such key' >&2; exit 3"], check=True)
