"""What killed it, and how to go on.

Covers: evidence, verdicts, policy, the supervisor that restarts.
Does not cover: watching the living (monitor).
"""
