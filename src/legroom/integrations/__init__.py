"""Thin adapters to training frameworks.

Covers: callbacks that hand Legroom's answers to a trainer.
Does not cover: any decision of their own.
"""
