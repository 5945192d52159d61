# ulimit -f: the checkpoint is larger than the shell allows, SIGXFSZ.
ulimit -f 1024
exec "$PYTHON" -c '
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
with open(os.environ["DEATH_DISK"] + "/model.pt", "wb") as file:
    file.write(bytes(64 << 20))
'
