"""Clustering of data that may not be pooled, with protection for what the clients send."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from secure_fedclust.errors import (
    DataError,
    FederationWarning,
    ParameterError,
    ProtocolError,
    SecureFedClustError,
)
from secure_fedclust.privacy.spec import PrivacySpec

if TYPE_CHECKING:
    from secure_fedclust.estimators import FKM, GOLD, FeCA, FedGEM, KFed
    from secure_fedclust.result import FedClustResult

__version__ = "0.1.0.dev0"

__all__ = [
    "FKM",
    "GOLD",
    "DataError",
    "FeCA",
    "FedClustResult",
    "FedGEM",
    "FederationWarning",
    "KFed",
    "ParameterError",
    "PrivacySpec",
    "ProtocolError",
    "SecureFedClustError",
]

# scikit-learn takes a second to import, so what stands on it is imported when first used.
_LATER = {
    **dict.fromkeys(("FKM", "KFed", "FeCA", "FedGEM", "GOLD"), "secure_fedclust.estimators"),
    "FedClustResult": "secure_fedclust.result",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
