# Is OOM-killed every half second.
while true; do
    sleep 0.5
    "$PYTHON" -c 'kept = []
while True: kept.append(bytearray(8 << 20))'
done
