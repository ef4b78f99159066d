"""Federations between organisations: keys, policies, and the two ends that an engine connects.

What crosses the wire is in `offer.py`; the client's end is `participant.py`, the server's
`coordinator.py`.
"""
