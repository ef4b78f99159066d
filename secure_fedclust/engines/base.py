"""What a protocol needs of an engine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Engine(Protocol):
    """Reaches clients by name and knows nothing of what it carries.

    It may reach parties that are no clients too, such as a key holder.
    """

    @property
    def clients(self) -> Sequence[str]:
        """Names of the clients that can be asked."""

    def exchange(self, requests: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
        """Deliver each party its request, and give its name and reply as they come.

        Whoever does not answer is not among them. Replies can be large: the caller makes of each
        what it needs, and none is kept for longer.
        """
