"""Carries requests and replies between the server and its clients, as bytes."""

from secure_fedclust.engines.base import Engine
from secure_fedclust.engines.inprocess import Fault, InProcessEngine

__all__ = ["Engine", "Fault", "InProcessEngine"]
