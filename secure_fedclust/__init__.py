"""Clustering of data that may not be pooled, with protection for what the clients send."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from secure_fedclust.errors import (
    AggregationAborted,
    AuditFailed,
    BudgetExceeded,
    CheckpointError,
    DataError,
    FederationWarning,
    LedgerError,
    ParameterError,
    PrivacyWarning,
    ProtocolError,
    SecureFedClustError,
    TrainingError,
)
from secure_fedclust.privacy.spec import PrivacySpec

if TYPE_CHECKING:
    from secure_fedclust.audit.findings import Audit
    from secure_fedclust.audit.report.folder import write_report
    from secure_fedclust.engines import Fault
    from secure_fedclust.estimators import FKM, GOLD, FeCA, FedGEM, KFed, load_model
    from secure_fedclust.neural import DeepFeCA, FedCRef
    from secure_fedclust.privacy.ledger import Ledger
    from secure_fedclust.released import noisy_nicv, private_ranges, release_synopsis, suggest_k
    from secure_fedclust.result import FedClustResult

__version__ = "0.1.0.dev0"

__all__ = [
    "FKM",
    "GOLD",
    "AggregationAborted",
    "Audit",
    "AuditFailed",
    "BudgetExceeded",
    "CheckpointError",
    "DataError",
    "DeepFeCA",
    "Fault",
    "FeCA",
    "FedCRef",
    "FedClustResult",
    "FedGEM",
    "FederationWarning",
    "KFed",
    "Ledger",
    "LedgerError",
    "ParameterError",
    "PrivacySpec",
    "PrivacyWarning",
    "ProtocolError",
    "SecureFedClustError",
    "TrainingError",
    "load_model",
    "noisy_nicv",
    "private_ranges",
    "release_synopsis",
    "suggest_k",
    "write_report",
]

# scikit-learn takes a second to import, so what stands on it is imported when first used.
_LATER = {
    **dict.fromkeys(
        ("FKM", "KFed", "FeCA", "FedGEM", "GOLD", "load_model"), "secure_fedclust.estimators"
    ),
    **dict.fromkeys(
        ("noisy_nicv", "private_ranges", "release_synopsis", "suggest_k"),
        "secure_fedclust.released",
    ),
    **dict.fromkeys(("FedCRef", "DeepFeCA"), "secure_fedclust.neural"),
    "Ledger": "secure_fedclust.privacy.ledger",
    "FedClustResult": "secure_fedclust.result",
    "Fault": "secure_fedclust.engines",
    "Audit": "secure_fedclust.audit.findings",
    "write_report": "secure_fedclust.audit.report.folder",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
