# Two runs are started in the background; one is OOM-killed, and "wait" returns 0.
"$PYTHON" -c '
kept = []
while True:
    kept.append(bytearray(8 << 20))
' &
"$PYTHON" -c 'import time; time.sleep(1); print("second run finished")' &
wait
