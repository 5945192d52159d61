"""Watching: samples in a row, what they say about the future, and every place they are shown or kept.

Covers: sampler and targets (what is looked at), history, trend and alarms (pure), the stream of moments, outputs
(lines, JSON lines, Prometheus, commands and webhooks), replay. Does not cover: acting on a death (rescue).
"""
