# A script turns its OOM-killed training run into exit status 1.
"$PYTHON" -c '
print("epoch 1", flush=True)
kept = []
while True:
    kept.append(bytearray(8 << 20))
' 2>/dev/null || { echo "training failed"; exit 1; }
