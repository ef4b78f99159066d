"""Who may be in a sum, and how many of them must be."""

from collections.abc import Sequence
from dataclasses import dataclass

from secure_fedclust.errors import AggregationAborted, ParameterError

SMALLEST_COHORT = 3
"""Of two clients, each could subtract its own vector from the sum and see the other's."""

LARGEST_COHORT = 1 << 12
"""Where everybody shares with everybody: beyond a few thousand that is too much to send. What is
encrypted has room for the errors of so many."""

LARGEST_FEDERATION = 1 << 16
"""Where each shares with some neighbours only. Noise has 2^12 steps at least, so that each client
of so many still adds 16: the least that is fine enough (docs/proofs/discrete_noise.md)."""

MOST_NAMES = 10
"""Clients that an error names."""


@dataclass(frozen=True)
class Rules:
    """What all clients have agreed on beforehand; no number of it comes from the server.

    Parameters
    ----------
    min_survivors : int
        Vectors that must be in a sum; with masking on a complete graph, shares that open it.
    colluders : int
        Clients that may share what they know with the server.
    agreement : bytes
        The privacy spec, in bytes: it goes into the derivation of keys.
    active_server : bool
        Whether clients sign, and check what the server shows to others. With masking only.
    least_honest : int
        Vectors of honest clients that a sum must have: two where there is no noise in them.
    most_clients : int
        Clients that were asked to take part: a cohort with more has some that nobody has asked.
    """

    min_survivors: int
    colluders: int
    agreement: bytes = b""
    active_server: bool = False
    least_honest: int = 1
    most_clients: int = LARGEST_FEDERATION

    def check(self, n_clients: int, largest: int = LARGEST_COHORT) -> None:
        """Refuse a cohort that is too small, or too large to keep apart two sets of survivors."""
        n, threshold, colluders = n_clients, self.min_survivors, self.colluders
        check_cohort(n, largest, self.active_server)
        if n > self.most_clients:
            raise ParameterError(
                f"a cohort of {n} clients, where {self.most_clients} were asked to take part"
            )
        if threshold > n:
            raise ParameterError(f"min_survivors={threshold} of {n} clients: give at most {n}")
        least = max(colluders + self.least_honest, 2)
        if threshold < least:
            raise ParameterError(
                f"min_survivors={threshold} with {colluders} colluders: one client's vector could "
                f"be seen; give at least {least}"
            )
        if self.active_server and 2 * threshold <= n + colluders:
            raise ParameterError(
                f"min_survivors={threshold} of {n} clients with {colluders} colluders: a server "
                "that does not keep to the protocol could open two sums of one round; give at "
                f"least {(n + colluders) // 2 + 1}"
            )

    def enough(
        self,
        there: Sequence[str],
        asked: Sequence[str],
        have_done: str,
        *,
        charged: bool = True,
        smallest: int = 1,
    ) -> list[str]:
        """Who is there, of those that were asked, or an error if these are too few.

        `charged` says whether the sum has begun to cost anything, `smallest` how many must begin it
        whatever the quorum is.
        """
        least, why, less = self.min_survivors, "min_survivors", ""
        if least < smallest:
            least, why = smallest, "no fewer begin a sum"
        else:
            less = ", or with a lower min_survivors, which means more noise"
        if len(there) < least:
            missing = [client for client in asked if client not in set(there)]
            names = ", ".join(missing[:MOST_NAMES]) + (", ..." if missing[MOST_NAMES:] else "")
            paid = "No sum was opened, and what was charged for it stays charged"
            if not charged:
                paid = "This sum was not begun, and costs nothing; what others cost stays charged"
            raise AggregationAborted(
                f"{len(there)} clients {have_done}, of at least {least} ({why}); missing: "
                f"{names}. {paid}: run again when they are back{less}"
            )
        return list(there)


def check_cohort(
    n_clients: int, largest: int = LARGEST_COHORT, active_server: bool = False
) -> None:
    """Refuse a number of clients whose vectors cannot be added up in secret."""
    if active_server and n_clients > LARGEST_COHORT:
        raise ParameterError(
            f"active_server=True with {n_clients} clients: beyond {LARGEST_COHORT} each shares "
            "keys with some neighbours only, and who with whom is drawn by the server. That "
            "protects nobody from this server: have fewer clients, or active_server=False"
        )
    if not SMALLEST_COHORT <= n_clients <= largest:
        raise ParameterError(
            f"a cohort of {n_clients} clients: sums over clients are protected for "
            f"{SMALLEST_COHORT} to {largest}; without (protection='none') there may be any number"
        )
