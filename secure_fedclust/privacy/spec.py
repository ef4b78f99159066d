"""The privacy that a run promises."""

from dataclasses import dataclass
from typing import Self

from secure_fedclust.errors import ParameterError


@dataclass(frozen=True)
class PrivacySpec:
    """What is promised about the messages that leave a client.

    There is no default: a run without differential privacy has to be asked for, with a reason,
    by `PrivacySpec.none`. That is also all this version can do: a spec with an `epsilon` is
    refused rather than run without its guarantee.

    Examples
    --------
    >>> PrivacySpec.none(reason="simulation on public data").describe()
    'NO DP CLAIM: messages leave the clients unprotected (simulation on public data)'
    """

    epsilon: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            raise ParameterError(
                f"epsilon={self.epsilon}: this version has no private protocols; "
                "use PrivacySpec.none(reason=...) to run without differential privacy"
            )
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ParameterError(
                "running without differential privacy needs a reason: "
                "PrivacySpec.none(reason='simulation on public data')"
            )
        if not self.reason.isprintable():
            raise ParameterError("the reason must be one line of printable text")

    @classmethod
    def none(cls, *, reason: str) -> Self:
        """No differential privacy, for the reason given, which every result repeats."""
        return cls(reason=reason)

    def describe(self) -> str:
        """Say the guarantee in one sentence."""
        return f"NO DP CLAIM: messages leave the clients unprotected ({self.reason})"
