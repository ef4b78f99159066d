"""The errors a caller may want to catch, each of which says what to change."""


class SecureFedClustError(Exception):
    """Base of every error this package raises on purpose."""


class DataError(SecureFedClustError, ValueError):
    """A client's records cannot be clustered as they are."""


class ParameterError(SecureFedClustError, ValueError):
    """A parameter, a configuration file or a privacy spec is not usable."""


class ProtocolError(SecureFedClustError):
    """A message is malformed, oversized, out of order, or too few clients answered."""


class AggregationAborted(ProtocolError):
    """A sum was not opened, because too few clients were left or one broke the rules."""


class FederationWarning(UserWarning):
    """The run went on without some client's message, or found fewer clusters than asked for."""


class LedgerError(SecureFedClustError):
    """A ledger cannot be used: missing, damaged, edited, of another version, or not writable."""


class BudgetExceeded(SecureFedClustError):
    """A release would spend more than a run's plan or a ledger's lifetime budget allows."""


class TrainingError(SecureFedClustError):
    """A network cannot be trained as asked, or its training went astray; nothing was sent."""


class CheckpointError(SecureFedClustError):
    """A checkpoint belongs to another run, or cannot be read; nothing was asked."""


class NotAdmitted(SecureFedClustError):
    """The ends of a federation do not let each other in: key, certificate, version, policy.

    `refused` are parties that have said so, where the server gives up a run before it has begun.
    """

    refused: tuple[str, ...] = ()


class PolicyRefusal(NotAdmitted):
    """A client's policy does not allow what it was asked for; nothing was computed or charged."""


class AuditFailed(SecureFedClustError):
    """An audit refutes the claim that it was to test."""


class PrivacyWarning(UserWarning):
    """A private run goes on, but its noise, its bound or its sampler deserve a look."""
