"""Measuring on the machine at hand: what ``knnpool-gen bench`` and ``knnpool-gen tune`` run.

Nothing here is needed to pool; the runtime imports none of it.
"""
