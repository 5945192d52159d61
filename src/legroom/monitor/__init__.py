"""A training over time.

Covers: samples, alarms, forecasts and their outputs.
Does not cover: what to do when it dies (rescue).
"""
