# timeout(1) kills the run at its limit: status 137, memory is not involved.
exec timeout -s KILL 2 "$PYTHON" -c '
import time
print("epoch 1", flush=True)
time.sleep(60)
'
