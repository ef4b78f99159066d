"""The command line.

Exit codes: 0 done, 2 a parameter or the configuration is not usable, 3 the data are not, 4 the
clients did not answer as they should, 5 the privacy budget does not allow it, 6 the privacy ledger
cannot be used or does not hold, 7 an audit refutes the claim, 8 a network cannot be trained, 9 what
was kept of a run cannot be used, 10 the ends of a federation do not let each other in.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from secure_fedclust import __version__
from secure_fedclust.commands import audit, federation, ledger, report, run, sweep
from secure_fedclust.errors import (
    AuditFailed,
    BudgetExceeded,
    CheckpointError,
    DataError,
    FederationWarning,
    LedgerError,
    NotAdmitted,
    ParameterError,
    PrivacyWarning,
    ProtocolError,
    SecureFedClustError,
    TrainingError,
)

EXIT_CODES: dict[type[SecureFedClustError], int] = {
    ParameterError: 2,
    DataError: 3,
    ProtocolError: 4,
    BudgetExceeded: 5,
    LedgerError: 6,
    AuditFailed: 7,
    TrainingError: 8,
    CheckpointError: 9,
    NotAdmitted: 10,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    code = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
        warnings.simplefilter("always", PrivacyWarning)
        try:
            arguments.command(arguments)
        except SecureFedClustError as error:
            print(f"secure-fedclust: {error}", file=sys.stderr)
            code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"secure-fedclust: {where}{error.strerror or error}", file=sys.stderr)
            code = EXIT_CODES[ParameterError]
        except KeyboardInterrupt:
            print("secure-fedclust: stopped; what was released stays charged", file=sys.stderr)
            code = 130
    for warning in caught:
        print(f"secure-fedclust: warning: {warning.message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="secure-fedclust", description="Cluster data that may not be pooled."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    output.add_argument("--json", action="store_true", help="print the table as JSON")
    for command in (run, sweep, audit):
        command.add(commands, output)
    ledger.add(commands)
    report.add(commands)
    federation.add(commands)
    return parser
