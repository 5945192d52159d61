# ulimit -v is too small for torch's libraries: the import fails.
ulimit -v 300000
exec "$PYTHON" -c 'import torch'
