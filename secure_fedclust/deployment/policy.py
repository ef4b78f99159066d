"""The least that a client demands of a run, in a file that its data-protection officer owns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from secure_fedclust.config import ALGORITHMS, read_toml
from secure_fedclust.errors import ParameterError, PolicyRefusal
from secure_fedclust.privacy.spec import PrivacySpec

PROTECTIONS = ("none", "masking", "ckks")


@dataclass(frozen=True)
class Policy:
    """What a client takes part in.

    Parameters
    ----------
    max_epsilon, max_delta : float
        The most that one run may promise. What all runs together may spend is the ledger's.
    protocols : sequence of str
        Algorithms that it takes part in.
    protections : sequence of str
        How messages must be hidden from the server beyond their noise: some of ``none``,
        ``masking`` and ``ckks``.
    min_cohort : int
        Clients that must at least be in a sum; with protection ``none``, that must be asked.
    max_cohort : int, optional
        Clients that may at most be asked. The more there are, the less noise each of them adds by
        itself, which is what is left if the server has made up the others. Needed with ``masking``
        or ``ckks``, unless `active_server` is true: others are known by their keys then.
    max_records_per_person : int, optional
        Records of one person that a run may use at most, which must limit them. The ledger counts
        records: so many times what it has spent is what a person has lost. Needed where records
        have a person column.
    min_colluders : int
        Colluding clients that sums must withstand.
    active_server : bool
        Whether sums must withstand a server that does not keep to the protocol, as masking can.
    without_privacy : bool
        Whether runs without differential privacy are allowed.
    """

    max_epsilon: float
    max_delta: float
    protocols: Sequence[str]
    protections: Sequence[str]
    min_cohort: int
    max_cohort: int | None = None
    max_records_per_person: int | None = None
    min_colluders: int = 1
    active_server: bool = False
    without_privacy: bool = False

    def __post_init__(self) -> None:
        for name, known in (("protocols", tuple(ALGORITHMS)), ("protections", PROTECTIONS)):
            given = getattr(self, name)
            if isinstance(given, str) or not given or not all(each in known for each in given):
                raise ParameterError(f"{name} = {given!r}: give some of {', '.join(known)}")
        for name in ("max_epsilon", "max_delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ParameterError(f"{name} = {value!r}: give a number above 0")
        whole = {"min_cohort": 1, "max_cohort": 1, "max_records_per_person": 1, "min_colluders": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if name in ("max_cohort", "max_records_per_person") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ParameterError(f"{name} = {value!r}: give a whole number from {least}")
        for name in ("active_server", "without_privacy"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} = {getattr(self, name)!r}: give true or false")

        self._check_sums()

    def _check_sums(self) -> None:
        """Refuse what would leave it to the server how much a sum protects."""
        if self.active_server and "ckks" in self.protections:
            raise ParameterError(
                "active_server = true with 'ckks' among the protections: encrypted sums trust the "
                "server to keep to the protocol. Take one of the two out"
            )
        if set(self.protections) == {"none"} or self.active_server or self.max_cohort is not None:
            return
        raise ParameterError(
            "max_cohort is missing: say how many clients there are at most. The more a server says "
            "there are, the less noise each adds, and nobody can tell whether it has made some up "
            "(active_server = true can)"
        )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a policy file, in which no key may be misspelt and none that matters be missing."""
        content = read_toml(Path(path), {each.name for each in fields(cls)})
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str) -> Self:
        """A policy from a table."""
        needed = ("max_epsilon", "max_delta", "protocols", "protections", "min_cohort")
        if missing := [name for name in needed if name not in content]:
            raise ParameterError(
                f"{where}: {', '.join(missing)} is missing, and there is no default: say what this "
                "client demands"
            )
        try:
            return cls(**content)
        except ParameterError as error:
            raise ParameterError(f"{where}: {error}") from error

    def check(self, algorithm: str, spec: PrivacySpec, n_clients: int) -> None:
        """Refuse a run that is beyond the policy.

        Raises
        ------
        PolicyRefusal
            Says what was asked for, and what the policy demands.
        """
        if algorithm not in self.protocols:
            raise PolicyRefusal(
                f"the run is {algorithm}, the policy allows {_some(self.protocols)}"
            )
        if spec.protection not in self.protections:
            raise PolicyRefusal(
                f"the run has protection {spec.protection!r}, the policy allows "
                f"{_some(self.protections)}"
            )
        if self.max_cohort is not None and n_clients > self.max_cohort:
            raise PolicyRefusal(
                f"{n_clients} clients are asked, the policy allows {self.max_cohort} at most"
            )
        cohort, what = n_clients, "clients are asked"
        if spec.protection != "none":
            cohort = min(spec.min_survivors or 0, n_clients)
            what = "clients may be left in a sum (min_survivors)"
            if spec.colluders < self.min_colluders:
                raise PolicyRefusal(
                    f"sums withstand {spec.colluders} colluders, the policy demands "
                    f"{self.min_colluders}"
                )
            if spec.protection == "masking" and self.active_server and not spec.active_server:
                raise PolicyRefusal(
                    "the run trusts the server to keep to the protocol, which the policy does not"
                )
        if cohort < self.min_cohort:
            raise PolicyRefusal(
                f"{cohort} {what}, the policy demands {self.min_cohort} (min_cohort)"
            )
        if not spec.is_private:
            if not self.without_privacy:
                raise PolicyRefusal("the run has no differential privacy, which the policy demands")
            return
        epsilon, delta = spec.target()
        if spec.records_per_person is not None:
            most_records = self.max_records_per_person or 0
            if spec.records_per_person > most_records:
                raise PolicyRefusal(
                    f"the run uses {spec.records_per_person} records of a person, the policy "
                    f"allows {most_records}"
                )
            epsilon = spec.person_epsilon()
        for name, asked, most in (
            ("epsilon", epsilon, self.max_epsilon),
            ("delta", delta, self.max_delta),
        ):
            if asked > most:
                raise PolicyRefusal(
                    f"the run asks for {name} {asked:g}, the policy allows {most:g} at most"
                )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names)
