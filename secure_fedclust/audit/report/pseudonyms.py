"""Names of clients that stay out of a report unless asked for."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LONG = 4
"""Letters from which on a name is found within other words, too."""


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
    >>> names("Bergen"), names.text("OSLO, and /srv/oslo2"), names.keys({"Oslo": 3})
    ('client 2', 'client 1, and /srv/[client 1]2', {'client 1': 3})
    """

    def __init__(self, clients: Iterable[str], shown: bool = False) -> None:
        known = list(dict.fromkeys(clients))
        self.shown = shown
        self._called = {
            client: client if shown else f"client {i}" for i, client in enumerate(known, 1)
        }
        self._folded: dict[str, str] = {}
        for client, called in self._called.items():
            bare = _bare(_fold(client)[0])
            self._folded[bare] = called if bare not in self._folded else "a client"
        self._within = _pattern(known, lambda name: len(_bare(_fold(name)[0])) >= LONG)
        self._whole = _pattern(known, lambda _: False)
        self._anywhere = _pattern(known, lambda name: len(name) > 1 and not name.isdecimal())

    def __call__(self, client: str) -> str:
        """What this client is called."""
        return self._called[client]

    def text(self, written: str) -> str:
        """What a user wrote, in which names may occur within words, too."""
        return self._without(self._within, written)

    def words(self, said: str) -> str:
        """What the program says, in which names are words of their own, and numbers numbers."""
        return self._without(self._whole, said, numbers=True)

    def keys(self, value: Any) -> Any:
        """A parameter, of which a mapping is by client, and nothing else is a name."""
        if not isinstance(value, Mapping):
            return value
        return {self._called[str(key)]: item for key, item in value.items()}

    def could_be_in(self, written: str) -> bool:
        """Whether a name that is not to be shown could be in what a user wrote."""
        return not self.shown and self._anywhere.search(_fold(written)[0]) is not None

    def _without(self, pattern: re.Pattern[str], text: str, *, numbers: bool = False) -> str:
        if self.shown:
            return text
        folded, origin = _fold(text)
        composed = unicodedata.normalize("NFKC", text)
        parts, done = [], 0
        for found in pattern.finditer(folded):
            if numbers and found.group().isdecimal():
                continue
            start, end = origin[found.start()], origin[found.end() - 1] + 1
            called = self._folded[_bare(found.group())]
            # Within a word: "client 12" would be somebody else.
            beside = composed[max(0, start - 1) : start], composed[end : end + 1]
            if any(map(str.isalnum, beside)):
                called = f"[{called}]"
            parts += [composed[done:start], called]
            done = end
        return "".join([*parts, composed[done:]]) if parts else text


def _pattern(names: Iterable[str], inside: Callable[[str], bool]) -> re.Pattern[str]:
    """Finds folded names, the longest first, whatever stands between their words."""
    ways = []
    for name in sorted(names, key=len, reverse=True):
        folded = _fold(name)[0]
        words = re.findall(r"[^\W_]+", folded)
        way = r"[\W_]*".join(map(re.escape, words)) if words else re.escape(folded)
        ways.append(way if inside(name) else rf"(?<![^\W_]){way}(?![^\W_])")
    return re.compile("|".join(way for way in ways if way) or r"(?!)")


def _fold(text: str) -> tuple[str, list[int]]:
    """Text without case, marks and ways of writing, and which character each of it came from."""
    folded, origin = [], []
    for i, character in enumerate(unicodedata.normalize("NFKC", text)):
        for part in unicodedata.normalize("NFKD", character.casefold()):
            if not unicodedata.combining(part):
                folded.append(part)
                origin.append(i)
    return "".join(folded), origin


def _bare(folded: str) -> str:
    """Without what stands between words."""
    return re.sub(r"[\W_]+", "", folded) or folded
