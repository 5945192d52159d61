"""Facts about this box, read and never judged.

Covers: /dev/shm, RAM and its cgroups, swap, pressure, GPUs, disks, limits, the place; one file a subject,
all below a root that is an argument (host.py).
Does not cover: what a number means or what to do about it (budget), series in time (monitor).
"""
