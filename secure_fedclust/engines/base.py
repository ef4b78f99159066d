"""What a protocol needs of an engine."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Engine(Protocol):
    """Reaches clients by name and knows nothing of what it carries."""

    @property
    def clients(self) -> Sequence[str]:
        """Names of the clients that can be asked."""

    def exchange(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """Deliver each client its request and return the replies.

        A client that does not answer is absent from the result.
        """
