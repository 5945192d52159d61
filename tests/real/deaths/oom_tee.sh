# The training run is OOM-killed in a pipe to tee, and the pipe's exit status is 0.
"$PYTHON" -c '
print("epoch 1", flush=True)
kept = []
while True:
    kept.append(bytearray(8 << 20))
' 2>&1 | tee "$DEATH_DISK/train.log"
