"""`legroom demo`: what Legroom does, measured on this machine in about a minute. Every figure is read while it runs.

demo_stages   the three stages, the kill -9, child processes under `legroom run` and their memory; what was measured
demo_scripts  what the child processes do: train, try a DataLoader in a small /dev/shm, measure three loaders; messages
demo_setup    how much data fits on this machine, the file, a directory, a /dev/shm of 64 MB, cleaning up

The screen and the table are in `cli.demo`, the chart in `charts.demo_chart`.
"""
