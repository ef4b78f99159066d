"""Names of clients that stay out of a report unless asked for."""

import re
from collections.abc import Iterable, Mapping
from typing import Any


class Names:
    """What clients are called in a report: ``client 1``, ``client 2`` and so on.

    Parameters
    ----------
    clients : iterable of str
        In the order in which they are counted.
    shown : bool
        Whether they are called by their names instead.

    Examples
    --------
    >>> names = Names(["Oslo", "Bergen"])
    >>> names("Bergen"), names.text("records of Oslo"), names.of({"Oslo": 3})
    ('client 2', 'records of client 1', {'client 1': 3})
    """

    def __init__(self, clients: Iterable[str], shown: bool = False) -> None:
        known = list(dict.fromkeys(clients))
        self.shown = shown
        self._called = {
            client: client if shown else f"client {i}" for i, client in enumerate(known, 1)
        }
        longest = sorted(known, key=len, reverse=True)
        # All at once, as a client's name may be what another one is called here.
        self._pattern = re.compile(
            "|".join(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])" for name in longest) or r"(?!)",
            re.IGNORECASE,
        )
        self._folded = {name.casefold(): called for name, called in self._called.items()}

    def __call__(self, client: str) -> str:
        """What this client is called."""
        return self._called[client]

    def text(self, words: str) -> str:
        """Words of a user's, in which names may occur."""
        if self.shown:
            return words
        return self._pattern.sub(
            lambda found: self._folded.get(found.group().casefold(), "a client"), words
        )

    def of(self, value: Any) -> Any:
        """A user's value, with names taken out wherever they are."""
        if isinstance(value, Mapping):
            return {self._key(str(key)): self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def _key(self, key: str) -> str:
        return self._called[key] if key in self._called else self.text(key)
