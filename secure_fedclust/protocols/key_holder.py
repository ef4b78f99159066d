"""The key holder as a party of its own, which an engine reaches by a name."""

from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import Envelope, Stage, Values
from secure_fedclust.privacy.ckks_round import KeyHolding
from secure_fedclust.protocols.party import Party


class KeyHolderParty(Party):
    """Answers the server's requests for keys, and for sums to be opened.

    Privacy unit: that of the spec, whose noise is in what it opens.
    Sensitivity: none of its own; it has no records.
    Who sees it: the server sees the sums that this party opens, and so does this party.

    Parameters
    ----------
    holding : KeyHolding
    """

    def __init__(self, holding: KeyHolding) -> None:
        super().__init__()
        self._holding = holding

    def forget(self) -> None:
        """Throw the keys away when the run has ended."""
        self._holding.forget()

    def _answer(self, envelope: Envelope, data: bytes) -> tuple[Stage, Values]:
        stage = self._holding.stages.get(envelope.schema)
        if stage is None:
            raise ProtocolError(
                "the request is for a stage that the key holder does not take part in"
            )
        request, _ = stage.request.decode(
            data, run=envelope.run, step=envelope.step, bounds=self._holding.bounds
        )
        return stage, self._holding.answer(stage, envelope.run, request)
