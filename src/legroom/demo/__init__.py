"""`legroom demo`: what the parts do together, shown and measured on this machine in a minute.

Covers: making a dataset, small trainings and loaders as child processes, killing and rescuing one, measuring all of it,
the table and the picture at the end. Does not cover: any part's own work (cache, loader, rescue, monitor), options
(cli). Every figure it shows was read while it ran.
"""
