"""What a claim rests on, each line derived from the run: enforced, assumed or violated."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from secure_fedclust.audit.report import trainings
from secure_fedclust.audit.report.facts import Facts
from secure_fedclust.audit.report.formulas import states_enough
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import MIN_NOISE
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.ledger import IN_A_SUM

Status = Literal["enforced", "assumed", "violated"]

_SYNOPSIS_SYSTEMS = ("KFed", "FeCA", "GOLD")
_SEEDED_SYSTEMS = ("FKM", "FedGEM")
_STEPPED = ("fedgem/sums", "fedgem/means")
_RANDOM = "it is drawn exactly, from the operating system's randomness, which is trusted"
_RANDOM_IN_TRAINING = (
    "; in training from AES-256 under a key from there, each probability to within a factor of "
    "1e-14 of one"
)
_NO_ROWS = "the ledger's rows are not here to be looked at"


@dataclass(frozen=True)
class Assumption:
    """One thing that a claim rests on.

    Attributes
    ----------
    name : str
    statement : str
        What has to be so, in plain words.
    status : {"enforced", "assumed", "violated"}
        Enforced by the program; taken on trust; or known not to be so.
    why : str
        How that is known.
    """

    name: str
    statement: str
    status: Status
    why: str


def assumptions(facts: Facts) -> list[Assumption]:
    """Every line that bears on this run."""
    lines = [*_declared(facts)]
    if facts.spec.is_private:
        lines += [*_data(facts), *_algorithm(facts), *_training(facts), *_noise(facts)]
    if facts.spec.protection != "none":
        lines += _sums(facts)
    lines += _connections(facts)
    if facts.spec.is_private:
        lines += [*_bookkeeping(facts), *_outside(facts)]
    lines.append(_code(facts))
    return lines


def _declared(facts: Facts) -> Iterator[Assumption]:
    """What the run itself says."""
    spec = facts.spec
    if not spec.is_private:
        yield Assumption(
            "noise",
            "What clients send has noise in it.",
            "violated",
            f"the run was asked for without differential privacy ({spec.reason})",
        )
    elif not facts.claims:
        yield Assumption(
            "declared",
            "The run claims differential privacy.",
            "violated",
            "it says itself that it makes none",
        )


def _data(facts: Facts) -> Iterator[Assumption]:
    spec = facts.spec
    region = "ranges of the features" if spec.ranges is not None else "bound on the records"
    yield Assumption(
        "bound",
        f"The {region} did not come from the records.",
        "assumed",
        "they were stated before the run; whether somebody had looked is not known to the program",
    )
    yield _clipping(facts)
    yield _sizes(facts)
    if spec.records_per_person is not None:
        yield Assumption(
            "persons",
            f"No more than {spec.records_per_person} records of a person at a client are used.",
            "enforced",
            "each client leaves out the rest; that the person column is right is assumed",
        )
    elif spec.unit == "record":
        yield Assumption(
            "persons",
            "A person has one record, or the claim is read as one about records.",
            "assumed",
            "no person column was given; a person with m records is protected with m times mu"
            + (_LESS if _trains(facts) else ""),
        )
    yield Assumption(
        "one client",
        "Nobody's data are at two clients.",
        "assumed",
        "clients' records are not compared; at c clients local noise protects with sqrt(c) times "
        "mu, noise in a sum with c times",
    )
    yield Assumption(
        "correlated",
        "What one record says about others is not counted.",
        "assumed",
        "a group of g records that go together is protected with g times mu"
        + (_LESS if _trains(facts) else ""),
    )


def _sizes(facts: Facts) -> Assumption:
    spec = facts.spec
    if spec.adjacency == "replace_one":
        return Assumption(
            "sizes",
            "The numbers of records at clients are public.",
            "assumed",
            "the claim is about changing a record, and protects no number of records",
        )
    if spec.public_size is not None:
        return Assumption(
            "sizes",
            "The size that clients are said to have did not come from the records.",
            "assumed",
            "it was stated before the run (public_size); the program never uses the true number",
        )
    return Assumption(
        "sizes",
        "How many records a client has is not used.",
        "enforced",
        "where a number is needed a noisy count is released, and charged",
    )


def _clipping(facts: Facts) -> Assumption:
    """Sensitivities worked out anew from the formulas and inputs in the ledger."""
    name, statement = "clipping", "Every record is clipped before anything is computed from it."
    if not facts.rows:
        return Assumption(name, statement, "assumed", f"clients do it, but {_NO_ROWS}")
    rows = facts.rows
    if not trainings.can_be_checked():
        rows = [row for row in rows if not trainings.is_training(row)]
    low = [row.number for row in rows if not states_enough(row, facts.spec.adjacency)]
    if low:
        return Assumption(
            name,
            statement,
            "violated",
            f"row {low[0]} of the ledger states a smaller sensitivity than its formula gives",
        )
    if len(rows) < len(facts.rows):
        why = "clients do it; what training costs was not worked out anew: install the extra deep"
        return Assumption(name, statement, "assumed", why)
    return Assumption(
        name,
        statement,
        "enforced",
        "noise is added to nothing else; the sensitivities of all "
        f"{len(facts.rows)} rows were worked out anew from their formulas",
    )


def _algorithm(facts: Facts) -> Iterator[Assumption]:
    result = facts.result
    given = result.parameters
    calibration = given.get("calibration")
    plain = [exchange.stage for exchange in result.history if exchange.form == "plain"]
    start = _start(facts)
    if start is not None:
        yield start
    if result.algorithm == "FedGEM" and calibration in ("floor", "theorem9"):
        enforced = given.get("enforce_floor") is True
        yield Assumption(
            "floor",
            "No mean is taken over less weight than the floor that its sensitivity assumes.",
            "enforced" if enforced else "violated",
            "the floor is put under every weight"
            if enforced
            else "enforce_floor=False: one record can move a mean across the whole region",
        )
    why = "no client was asked: all was computed from an earlier release"
    if plain:
        why = f"{plain[0]} was answered as it is, without noise"
    elif result.history:
        why = "no client answered anything as it is"
    yield Assumption(
        "questions",
        "What clients are asked is public, or computed from what was released.",
        "violated" if plain else "enforced",
        why,
    )
    if result.algorithm == "FedGEM":
        yield _steps(facts)
    yield Assumption(
        "tuning",
        "Numbers of clusters and other parameters were chosen without looking at the records.",
        "assumed",
        "they were given to the run; how somebody came by them is not known to the program",
    )
    if not _trains(facts):
        yield Assumption(
            "sampling",
            "No smaller cost is claimed because only some records or clients took part.",
            "enforced",
            "every release is charged in full: mu is sensitivity over noise",
        )


_LESS = ", and with more than the stated delta, as networks were trained"


def _trains(facts: Facts) -> bool:
    """Whether there was noisy training, in this run or in others on its ledger."""
    rows = [] if facts.ledger is None else facts.ledger.rows
    here = any(trainings.is_training(row) for row in rows)
    return here or facts.result.algorithm in trainings.SYSTEMS


def _training(facts: Facts) -> Iterator[Assumption]:
    """What noisy training rests on besides."""
    if not _trains(facts):
        return
    yield Assumption(
        "sampling",
        "In each step of training every record is drawn by itself, at a rate that is public or was "
        "released, and nobody outside the client learns which were.",
        "enforced",
        "the cost is smaller because of it; clients draw from a stream cipher, say nothing about "
        "it, and divide by the number expected, not by the number drawn",
    )
    yield Assumption(
        "batches",
        "How long a step of training takes is not measured from outside.",
        "assumed",
        "it grows with the number of records drawn, of which the cost supposes that it is secret",
    )
    yield Assumption(
        "parts",
        "No record is in two of the clusters that are trained on at the same time.",
        "enforced",
        "which one it is in follows from the record and from what was released, so that the most "
        "costly cluster is what all of them cost",
    )
    yield _tails(facts)


def _tails(facts: Facts) -> Assumption:
    name, records = "tails", facts.spec.records_per_person or 1
    statement = "What training may give away with a tiny probability has room in delta."
    if records > 1:
        statement = statement[:-1] + f", for a person with {records} records, too."
    ledger, limit = facts.ledger, facts.limit
    rows = [] if ledger is None else [row for row in ledger.rows if trainings.is_training(row)]
    if ledger is None or limit is None or not rows:
        return Assumption(name, statement, "assumed", f"clients see to it, but {_NO_ROWS}")
    large = [
        row.number
        for row in rows
        if not trainings.fits_into_delta(
            row,
            [ledger.limit, limit] if row.charge.run == ledger.run else [ledger.limit],
            records,
        )
    ]
    if large:
        why = f"row {large[0]} of the ledger has a larger tail than there is room for"
        return Assumption(name, statement, "violated", why)
    why = f"the {len(rows)} rows for training were looked at; together they need half the room"
    return Assumption(name, statement, "enforced", f"{why} at most")


def _start(facts: Facts) -> Assumption | None:
    given, algorithm = facts.result.parameters, facts.result.algorithm
    statement = "Where the algorithm starts does not depend on records, or was paid for."
    seeding = given.get("seeding")
    if seeding == "local" and given.get("calibration") != "synopsis":
        return Assumption(
            "start", statement, "violated", "seeding='local' sends records as the first centres"
        )
    if algorithm == "FedCRef" and given.get("initial") != "kmeans":
        why = "the first clusters were given, and may depend on all records at once"
        return Assumption("start", statement, "violated", why)
    if algorithm in trainings.SYSTEMS:
        why = (
            "networks start from random weights, and every assignment of a record is a function "
            "of it and of values that were released and charged"
        )
        return Assumption("start", statement, "enforced", why)
    if algorithm not in (*_SYNOPSIS_SYSTEMS, *_SEEDED_SYSTEMS):
        why = f"how {algorithm} starts, this report does not know"
        return Assumption("start", statement, "assumed", why)
    if algorithm in _SYNOPSIS_SYSTEMS or given.get("calibration") == "synopsis":
        why = "it starts from a noisy summary of each client, which was charged"
    elif given.get("one_shot") is True:
        why = "it starts from noisy summaries of the clients, which were charged"
    elif seeding == "private":
        why = "it starts from a noisy release, which was charged"
    elif seeding == "public":
        why = "it starts from an even spread over the stated region"
    else:
        why = f"how {algorithm} starts with seeding={seeding!r}, this report does not know"
        return Assumption("start", statement, "assumed", why)
    return Assumption("start", statement, "enforced", why)


def _steps(facts: Facts) -> Assumption:
    given = facts.result.parameters
    steps = int(given.get("n_local_steps") or 1)
    statement = "No step that a client takes by itself goes unpaid."
    if given.get("calibration") == "synopsis":
        why = "all steps are taken on a summary that was charged"
        return Assumption("steps", statement, "enforced", why)
    if steps == 1:
        why = "one step a round, and each is a release"
        return Assumption("steps", statement, "enforced", why)
    asked: Counter[str] = Counter()
    for exchange in facts.result.history:
        if exchange.stage in _STEPPED:
            asked.update(list(exchange.up))
    booked = Counter(row.charge.client for row in facts.rows if row.charge.message in _STEPPED)
    if not facts.rows:
        why = f"each of {steps} steps a round is charged, but {_NO_ROWS}"
        return Assumption("steps", statement, "assumed", why)
    if any(booked[client] < steps * n for client, n in asked.items()):
        why = f"{steps} steps a round were taken, and fewer were charged"
        return Assumption("steps", statement, "violated", why)
    return Assumption("steps", statement, "enforced", f"each of {steps} steps a round was charged")


def _noise(facts: Facts) -> Iterator[Assumption]:
    sampler = facts.result.sampler
    status: Status = "enforced" if facts.kept != "by the clients" else "assumed"
    yield Assumption(
        "randomness",
        "Nobody can predict the noise.",
        status if sampler == "secure" else "violated",
        _RANDOM + (_RANDOM_IN_TRAINING if _trains(facts) else "")
        if sampler == "secure"
        else f"sampler={sampler!r} is for experiments: its noise can be predicted",
    )
    statement = (
        f"Noise is fine: at least {MIN_NOISE} steps of the grid that numbers are rounded to."
    )
    coarse = [row.number for row in facts.rows if row.charge.sigma < MIN_NOISE]
    if coarse:
        why = f"row {coarse[0]} of the ledger has less"
        yield Assumption("grid", statement, "violated", why)
    elif facts.rows:
        why = f"all {len(facts.rows)} rows of the run were looked at"
        yield Assumption("grid", statement, "enforced", why)
    else:
        yield Assumption("grid", statement, "assumed", f"clients refuse less, but {_NO_ROWS}")
    yield _charged(facts)


def _charged(facts: Facts) -> Assumption:
    """Whether there is a row for everything noisy that was seen of each client."""
    name, statement = "charged", "Everything that was seen had been charged before noise was drawn."
    if not facts.rows:
        return Assumption(name, statement, "assumed", f"clients charge first, but {_NO_ROWS}")
    seen: Counter[tuple[str, bool]] = Counter()
    for exchange in facts.result.history:
        if exchange.form == "noisy":
            seen.update((client, False) for client in exchange.up)
    trained = {row.charge.client for row in facts.rows if trainings.is_training(row)}
    for opened in facts.result.sums:
        # A sum of networks has no noise of its own: each of them was paid for when it was trained.
        seen.update(
            (client, True)
            for client in opened.survivors
            if opened.share > 0 or client not in trained
        )
    booked = Counter(
        (row.charge.client, row.charge.message.endswith(IN_A_SUM)) for row in facts.rows
    )
    here = {row.charge.client for row in facts.ledger.rows} if facts.ledger is not None else set()
    whole = not facts.own_ledgers
    short = [
        client
        for (client, summed), times in seen.items()
        if (whole or client in here) and booked[client, summed] < times
    ]
    if short:
        return Assumption(
            name,
            statement,
            "violated",
            "the ledger has fewer rows of this run than answers that were seen of some client",
        )
    return Assumption(
        name,
        statement,
        "enforced",
        "there is a row for every noisy answer and every sum that was seen; each client writes it "
        "first",
    )


def _sums(facts: Facts) -> Iterator[Assumption]:
    spec, opened = facts.spec, facts.result.sums
    least = spec.min_survivors
    statement = f"No sum over fewer than {least} clients was opened."
    few = least is None or any(len(each.survivors) < least for each in opened)
    sparse = _sparse(facts)
    by_clients = spec.protection == "masking" and not sparse
    status: Status = "violated" if few else "enforced" if by_clients else "assumed"
    why = f"{len(opened)} sum{'s' * (len(opened) != 1)} opened, each over "
    why += f"{min((len(each.survivors) for each in opened), default=0)} clients or more"
    why += (
        "; clients see to it themselves"
        if by_clients
        else "; how many are in a sum is the server's word"
    )
    yield Assumption("survivors", statement, status, why)
    if sparse:
        yield Assumption(
            "neighbours",
            "The server draws at random, anew for each sum, which clients share keys, and who "
            "fails does not depend on it.",
            "assumed",
            f"with {max(each.n_clients for each in opened)} clients each shares keys with some "
            "others only, and cannot see how they were chosen. If so, masks protect less than they "
            "should with a probability of 2^-40 a sum",
        )
    if spec.is_private:
        exact = [each.stage for each in opened if not each.noisy]
        yield Assumption(
            "noise in sums",
            "In every sum there is noise.",
            "violated" if exact else "assumed",
            f"{exact[0]} was opened without"
            if exact
            else "each client adds its share; nobody can check another client's noise",
        )
        yield Assumption(
            "honest",
            f"In every sum is the noise of {spec.honest_survivors} clients or more that share "
            f"with nobody what they know (up to {spec.colluders} may).",
            "assumed",
            "a judgement about who takes part; the fallback says what is left without it",
        )
    if spec.protection == "ckks":
        yield Assumption(
            "server",
            "The server keeps to the protocol.",
            "assumed",
            "with encryption no other server is withstood",
        )
        yield Assumption(
            "key holder",
            "The key holder does not work with the server, and takes nothing but whole numbers "
            "from what it opens.",
            "assumed",
            "together they read each client's vector; against the key holder the claim is argued, "
            "not proved",
        )
        return
    yield Assumption(
        "server",
        "A server that does not keep to the protocol learns no more."
        if spec.active_server
        else "The server keeps to the protocol.",
        "enforced" if spec.active_server else "assumed",
        "clients sign what they were shown, and open nothing else; that their signing keys were "
        "exchanged by a way that the server cannot change is assumed"
        if spec.active_server
        else "with active_server=True clients would check that themselves",
    )


def _sparse(facts: Facts) -> bool:
    """Whether there was a sum in which clients shared keys with some others only."""
    spec = facts.spec
    if spec.protection != "masking":
        return False
    rules = Rules(spec.min_survivors or 0, spec.colluders, active_server=spec.active_server)
    for opened in facts.result.sums:
        try:
            if not Graph.of(opened.n_clients, rules).is_complete:
                return True
        except ParameterError:
            continue  # no such cohort can have been: other lines say so
    return False


def _connections(facts: Facts) -> Iterator[Assumption]:
    federation = facts.result.federation
    if federation is None:
        return
    yield Assumption(
        "connections",
        "Nobody between clients and server reads or changes messages, and each client is the one "
        "that the server takes it for.",
        "enforced" if federation.get("encrypted") else "assumed",
        "by TLS, and a key for each client that was registered beforehand; whether cards and "
        "certificates were exchanged by a way to trust is for both sides to know"
        if federation.get("encrypted")
        else "the run was made with --insecure: without encryption, on one machine",
    )


def _bookkeeping(facts: Facts) -> Iterator[Assumption]:
    if facts.kept == "verified" and facts.ledger is not None:
        n = facts.ledger.n_anchors
        yield Assumption(
            "ledger holds",
            "The ledger is as it was written.",
            "enforced",
            f"every row was checked, and {n} anchor{'s' * (n != 1)} of the result",
        )
        yield Assumption(
            "only ledger",
            "It is the only ledger of these data, and no older copy was used in between.",
            "assumed",
            "beyond the anchors of this result nobody can know",
        )
    elif facts.kept == "by the clients":
        yield Assumption(
            "only ledger",
            "Each client enforces the same spec, and keeps one ledger.",
            "assumed",
            "the ledgers are the clients'; each can verify its own against its anchor below",
        )
    else:
        yield Assumption(
            "only ledger",
            "No other run used the same data.",
            "assumed",
            "no ledger was given, so the claim is for this run alone; two runs cost both",
        )
    yield Assumption(
        "other releases",
        "Nothing else was given away about these data outside the ledger.",
        "assumed",
        "labels, statistics or models made from them without it are not counted",
    )


def _outside(facts: Facts) -> Iterator[Assumption]:
    yield Assumption(
        "computers",
        "Each client's computer, and the program installed there, can be trusted.",
        "assumed",
        "no program can vouch for its own computer"
        + (
            "; the encryption that was used is trusted, too"
            if facts.spec.protection != "none"
            else ""
        ),
    )


def _code(facts: Facts) -> Assumption:
    statement = "The code does what the proofs say."
    if facts.audit is None:
        return Assumption("code", statement, "assumed", "this kind of run was not attacked")
    verdict = facts.audit.verdict
    if verdict == "FAIL":
        failed = next(
            f for f in facts.audit.findings if f.verdict == "FAIL" and f.kind != "exhibit"
        )
        why = f"{failed.name}: more was found than the claim allows"
        return Assumption("code", statement, "violated", why)
    if verdict == "PASS":
        return Assumption("code", statement, "assumed", "attacked without success")
    return Assumption(
        "code", statement, "assumed", "attacked, but not by attacks that would have found much"
    )
