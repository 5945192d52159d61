"""`legroom demo`: what Legroom does, measured on this machine in about a minute. Every figure is read while it runs.

demo_stages      the order of everything, the three stages, the kill -9; what was measured
event_loop       waits for children, measures their memory, obeys signals
demo_child    a child under `legroom run`, its messages, and ending it with its parent
training_script  a child: trains a small model, saves checkpoints, resumes
loader_script    a child: a DataLoader in a small /dev/shm, and the speed of three loaders
demo_data        how much data fits on this machine, and writing it
sandbox          directories and environment of the children, a /dev/shm of 64 MB, cleaning up

The screen and the table are in `cli.demo`, the chart in `charts.demo_chart`.
"""
