"""Decisions about memory: pure functions of a Box.

Covers: findings, safe settings, remedies for this place.
Does not cover: reading the box (probe) and acting on it (cache, loader, rescue).
"""
