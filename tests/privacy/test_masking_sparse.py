"""Masking where clients are many, and each has some neighbours only."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import ParameterError, PrivacySpec, ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.privacy import masks, shamir
from secure_fedclust.privacy.cohort import LARGEST_COHORT, LARGEST_FEDERATION, Rules
from secure_fedclust.privacy.graph import SPARSE_FROM, Graph, sparse_parameters
from secure_fedclust.privacy.masking import ADVERTISE, MASK, SHARE, UNMASK, Masking
from secure_fedclust.privacy.masking_client import MaskingClient
from secure_fedclust.privacy.masking_opening import Opening
from secure_fedclust.privacy.masking_stages import cohort_digest, context_of
from secure_fedclust.privacy.masks import KEY_BYTES, digest, public_key
from secure_fedclust.protocols.sums import with_quorum

from .masking_federation import (
    QUESTION,
    RUN,
    UNLIKELY,
    Federation,
    asks_nothing_of,
    byte_uniformity,
    is_exact,
)

N, COLLUDERS, DROPOUTS = 104, 4, 8


def sparse_federation(n=N, dropouts=DROPOUTS, colluders=COLLUDERS, **more):
    f = Federation(n, n - dropouts, colluders=colluders, **more)
    assert not Graph.of(n, f.rules).is_complete
    return f


@pytest.fixture(scope="module")
def finished():
    """A round that nobody is lost in but one before it sends its vector, and its graph."""
    f = sparse_federation()
    f.lost = [(MASK, f.names[5])]
    f.opened = f.total()
    return f


def circle_of(f, name, number=0):
    """Names in a client's circle, in order, by the keys that it was shown."""
    by_key = {
        f.replies[number, ADVERTISE, other]["keys"].tobytes(): other
        for other in f.names
        if (number, ADVERTISE, other) in f.replies
    }
    return [by_key[row.tobytes()] for row in f.requests[number, SHARE, name]["keys"]]


# Sums.


@settings(max_examples=8)
@given(st.data())
def test_the_sum_is_that_of_the_survivors_whoever_drops_out_at_whichever_stage(data):
    f = sparse_federation(
        length=data.draw(st.integers(1, 20)), seed=data.draw(st.integers(0, 2**32 - 1))
    )
    places = data.draw(st.permutations(range(N)))[: data.draw(st.integers(0, DROPOUTS))]
    stages = [data.draw(st.sampled_from((ADVERTISE, SHARE, MASK, UNMASK))) for _ in places]
    f.lost = [(stage, f.names[i]) for stage, i in zip(stages, places, strict=True)]
    total = f.total()
    gone = {f.names[i] for s, i in zip(stages, places, strict=True) if s is not UNMASK}
    assert total.survivors == tuple(name for name in f.names if name not in gone)
    assert is_exact(f, total)


@pytest.mark.parametrize("stage", [ADVERTISE, SHARE, MASK, UNMASK])
def test_one_more_than_may_drop_out_aborts_and_nothing_is_opened(stage):
    f = sparse_federation()
    f.lost = [(stage, name) for name in f.names[: DROPOUTS + 1]]
    with mock.patch.object(Opening, "left_over") as opens:
        with pytest.raises(AggregationAborted, match=f"of at least {N - DROPOUTS}"):
            f.total()
    opens.assert_not_called()
    if stage is not UNMASK:
        assert not [key for key, _ in f.replies.items() if key[1] is UNMASK]


def test_sums_are_those_of_the_complete_graph(monkeypatch):
    f = sparse_federation(vectors=np.full((N, 3), (1 << 54) - 1))
    sparse = f.total(largest=1 << 62)
    monkeypatch.setattr("secure_fedclust.privacy.graph.SPARSE_FROM", 10_000)
    complete = f.total(largest=1 << 62)
    assert len(f.requests[1, SHARE, f.names[0]]["keys"]) == N
    np.testing.assert_array_equal(sparse.steps, complete.steps)
    assert sparse.survivors == complete.survivors


def test_neighbours_are_drawn_anew_in_every_round():
    f = sparse_federation(length=1)
    f.total()
    f.total()
    circles = [{frozenset(circle_of(f, name, i)) for name in f.names} for i in range(2)]
    assert len(circles[0]) == len(circles[1]) == N
    assert not circles[0] & circles[1]


def test_a_cohort_that_has_shrunk_has_the_graph_of_its_number():
    f = sparse_federation()
    f.lost = [(ADVERTISE, name) for name in f.names[:DROPOUTS]]
    total = f.total()
    assert is_exact(f, total)
    # Nobody may drop out any more, and below a hundred all are neighbours.
    assert f.requests[0, SHARE, f.names[-1]]["n_clients"] == N - DROPOUTS
    assert total.n_clients == N - DROPOUTS == len(f.requests[0, SHARE, f.names[-1]]["keys"])


def test_a_client_works_for_its_neighbours_only(finished):
    f = finished
    degree, _ = sparse_parameters(N, COLLUDERS, DROPOUTS)
    alone = f.names[5]
    assert is_exact(f, f.opened)
    assert f.opened.survivors == tuple(name for name in f.names if name != alone)
    for name in f.names:
        assert f.requests[0, SHARE, name]["keys"].shape == (degree + 1, 64)
        assert f.replies[0, SHARE, name]["sealed"].shape[0] == degree + 1
        asked = f.requests[0, UNMASK, name] if name != alone else None
        if asked is not None:
            lost = alone in circle_of(f, name)
            assert (len(asked["survivors"]), len(asked["dropped"])) == (degree + 1 - lost, lost)


# What a client refuses.

REFUSALS = {}


def refused(stage, match):
    def add(tell):
        REFUSALS[tell.__name__.replace("_", " ")] = stage, tell, match
        return tell

    return add


@refused(SHARE, r"the keys of \d+ clients were shown to this one, which shares with \d+ of 104")
def fewer_neighbours(f, name, request):
    return {**request, "keys": request["keys"][1:]}


@refused(SHARE, r"the keys of \d+ clients were shown to this one, which shares with \d+ of 104")
def more_neighbours(f, name, request):
    others = [n for n in f.names if n not in circle_of(f, name, f.number)]
    more = f.replies[f.number, ADVERTISE, others[0]]["keys"]
    return {**request, "keys": np.concatenate([request["keys"], more[None]])}


@refused(SHARE, "have one key")
def one_neighbour_twice(f, name, request):
    return {**request, "keys": np.concatenate([request["keys"][:1], request["keys"][:-1]])}


@refused(SHARE, "have one key")
def itself_as_a_neighbour(f, name, request):
    keys = request["keys"].copy()
    keys[0] = keys[len(keys) // 2]
    return {**request, "keys": keys}


@refused(SHARE, "not in the cohort")
def a_circle_that_it_is_not_in(f, name, request):
    keys = request["keys"].copy()
    others = [n for n in f.names if n not in circle_of(f, name, f.number)]
    keys[len(keys) // 2] = f.replies[f.number, ADVERTISE, others[0]]["keys"]
    return {**request, "keys": keys}


@refused(SHARE, "off its place")
def a_circle_that_it_is_not_in_the_middle_of(f, name, request):
    return {**request, "keys": np.roll(request["keys"], 1, axis=0)}


@refused(SHARE, r"the keys of \d+ clients were shown to this one, which shares with \d+ of 1000")
def a_larger_cohort(f, name, request):
    return {**request, "n_clients": 1000}


@refused(SHARE, "the keys of 15 clients were shown to this one, which shares with 98 of 99")
def a_cohort_so_small_that_all_are_neighbours(f, name, request):
    return {**request, "n_clients": 99}


@refused(SHARE, f"min_survivors={N - DROPOUTS} of 50 clients")
def a_cohort_below_the_quorum(f, name, request):
    return {**request, "n_clients": 50}


@refused(SHARE, "whole number from 0 to 65536")
def a_cohort_beyond_all_limits(f, name, request):
    return {**request, "n_clients": LARGEST_FEDERATION + 1}


@refused(MASK, r"\d+ clients are left, this one goes on from \d+ only")
def fewer_neighbours_left_than_its_secrets_need(f, name, request):
    middle = len(f.requests[f.number, SHARE, name]["keys"]) // 2
    _, threshold = sparse_parameters(N, COLLUDERS, DROPOUTS)
    few = [i for i in request["members"].tolist() if i != middle][: threshold - 1]
    few = sorted([*few, middle])
    return {**request, "members": np.array(few), "sealed": request["sealed"][few]}


@refused(MASK, f"{N - DROPOUTS - 1} clients are left, this one goes on from {N - DROPOUTS} only")
def fewer_members_in_all_than_the_quorum(f, name, request):
    return {**request, "n_members": N - DROPOUTS - 1}


@refused(MASK, "105 clients are said to be left, of whom this one sees")
def more_members_than_clients(f, name, request):
    return {**request, "n_members": N + 1}


@refused(MASK, "104 clients are said to be left, of whom this one sees")
def all_members_in_spite_of_a_neighbour_that_is_gone(f, name, request):
    gone = {"members": request["members"][1:], "sealed": request["sealed"][1:]}
    return {**request, **gone, "n_members": N}


@refused(MASK, "not among the members")
def members_without_it(f, name, request):
    middle = len(f.requests[f.number, SHARE, name]["keys"]) // 2
    kept = [i for i, member in enumerate(request["members"]) if member != middle]
    return {
        **request,
        "members": request["members"][kept],
        "sealed": request["sealed"][kept],
    }


@refused(MASK, "was changed, or not made for this client")
def an_envelope_for_somebody_else(f, name, request):
    sealed = request["sealed"].copy()
    sealed[[0, 1]] = sealed[[1, 0]]
    return {**request, "sealed": sealed}


@refused(UNMASK, "among the survivors and among the dropped")
def a_neighbour_that_has_survived_and_dropped(f, name, request):
    return {**request, "dropped": request["survivors"][:1]}


@refused(UNMASK, "survivors and dropped together are not the members")
def a_neighbour_that_is_neither(f, name, request):
    alive = request["survivors"][1:]
    return {**request, "survivors": alive, "n_survivors": request["n_survivors"] - 1}


@refused(UNMASK, r"\d clients are left, this one goes on from \d only")
def fewer_surviving_neighbours_than_the_threshold(f, name, request):
    middle = len(f.requests[f.number, SHARE, name]["keys"]) // 2
    _, threshold = sparse_parameters(N, COLLUDERS, DROPOUTS)
    everybody = sorted([*request["survivors"].tolist(), *request["dropped"].tolist()])
    alive = sorted([*[i for i in everybody if i != middle][: threshold - 1], middle])
    dropped = [i for i in everybody if i not in alive]
    return {**request, "survivors": np.array(alive), "dropped": np.array(dropped)}


@refused(UNMASK, f"{N - DROPOUTS - 1} clients are left, this one goes on from {N - DROPOUTS} only")
def fewer_survivors_in_all_than_the_quorum(f, name, request):
    return {**request, "n_survivors": N - DROPOUTS - 1}


@refused(UNMASK, "105 clients are said to be left")
def more_survivors_than_clients(f, name, request):
    return {**request, "n_survivors": N + 1}


@refused(UNMASK, "this client among them")
def survivors_without_it(f, name, request):
    middle = len(f.requests[f.number, SHARE, name]["keys"]) // 2
    alive = request["survivors"]
    return {**request, "survivors": alive[alive != middle], "dropped": np.array([middle])}


@refused(UNMASK, "in order and once")
def a_neighbour_beyond_its_circle(f, name, request):
    return {**request, "dropped": np.array([len(f.requests[f.number, SHARE, name]["keys"])])}


def test_every_lie_is_refused_and_the_round_goes_on_as_if_it_had_not_been_told():
    """All lies of a stage are told to one client before the truth."""
    f = sparse_federation(length=3)
    victim, told = f.names[7], Counter()

    def on_request(stage, name, request):
        if name == victim:
            f.requests[f.number, stage, name] = request
            for lie, (at, tell, match) in REFUSALS.items():
                if at is stage:
                    contributed = len(f.asked_of)
                    with pytest.raises(ProtocolError, match=match):
                        f.deliver(stage, name, tell(f, name, request))
                    assert len(f.asked_of) == contributed
                    told[lie] += 1
        return request

    f.on_request = on_request
    total = f.total()
    assert set(told) == set(REFUSALS)
    assert victim in total.survivors and is_exact(f, total)


def test_nothing_is_unmasked_a_second_time(finished):
    name = finished.names[0]
    with pytest.raises(ProtocolError, match="round 0 is not under way"):
        finished.deliver(UNMASK, name, finished.requests[0, UNMASK, name])


def test_a_threshold_is_the_clients_own_and_no_field_of_any_request():
    for stage in (ADVERTISE, SHARE, MASK, UNMASK):
        assert not {"threshold", "degree", "least"} & set(stage.request.fields)


def test_a_client_with_another_quorum_or_other_colluders_expects_another_graph():
    f = sparse_federation()
    odd = f.clients[f.names[3]]
    odd.rules = replace(odd.rules, colluders=20)
    total = f.total()
    assert f.names[3] not in total.survivors and is_exact(f, total)
    [(stage, name, error)] = f.refusals
    assert (stage, name) == (SHARE, f.names[3])
    assert "which shares with" in str(error)


# What goes into keys.


def test_clients_that_were_shown_another_question_do_not_unmask():
    f = sparse_federation()
    f.on_request = asks_nothing_of(f.names[: N // 2])
    with pytest.raises(AggregationAborted, match="no sum of clients' vectors"):
        f.total()


@pytest.mark.parametrize(("stage", "field"), [(SHARE, "roster"), (MASK, "roll")])
def test_clients_that_were_told_of_another_cohort_do_not_unmask(stage, field):
    f = sparse_federation()
    half = set(f.names[: N // 2])

    def on_request(at, name, request):
        other = at is stage and name in half
        return {**request, field: request[field] ^ 1} if other else request

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        f.total()


def test_clients_that_were_told_of_another_number_refuse_for_the_graph_is_not_that_of_it():
    f = sparse_federation()
    half = set(f.names[: N // 2])

    def on_request(stage, name, request):
        if stage is SHARE and name in half:
            return {**request, "n_clients": N + 4}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted, match="have sent shares"):
        f.total()
    assert {name for _, name, _ in f.refusals} == half
    assert not f.asked_of


# What a server and colluders hold.


def shares_held(f, holders, victim):
    """Shares of a client's two secrets that some of its circle were sent, by their points."""
    circle = circle_of(f, victim)
    texts = f.texts[f.replies[0, ADVERTISE, victim]["keys"].tobytes()]
    return {circle.index(name) + 1: texts[circle.index(name)] for name in holders if name in circle}


@pytest.fixture(scope="module")
def watched():
    """A round whose shares are all known to the test, as they were made."""
    f, made = sparse_federation(n=150, dropouts=15, colluders=15), {}

    class Watched(MaskingClient):
        def _share(self, round_, **request):
            real = shamir.split

            def split(*given):
                made[round_.public] = real(*given)
                return made[round_.public]

            with mock.patch.object(shamir, "split", split):
                return super()._share(round_, **request)

    f.clients = {name: Watched(f.rules) for name in f.names}
    f.texts = made
    f.lost = [(MASK, name) for name in f.names[20:24]]
    assert is_exact(f, f.total())
    return f


def test_colluders_hold_too_few_shares_of_every_honest_client(watched):
    f, colluders = watched, watched.names[:15]
    graph = Graph.of(150, f.rules)
    most = 0
    for victim in f.names[15:]:
        held = shares_held(f, colluders, victim)
        most = max(most, len(held))
        assert len(held) < graph.threshold
    assert most > 0


def test_the_server_with_all_colluders_cannot_open_an_honest_client(watched):
    """With what colluders hold, and what was revealed, one secret of each is open, and no other."""
    f, colluders, dropped = watched, watched.names[:15], watched.names[20:24]
    graph = Graph.of(150, f.rules)
    for victim in f.names[15:]:
        circle, advertised = circle_of(f, victim), f.replies[0, ADVERTISE, victim]
        revealed = {}
        for holder in circle:
            reply = f.replies.get((0, UNMASK, holder))
            if reply is not None:
                row = [n for n in circle_of(f, holder) if n in f.names].index(victim)
                revealed[circle.index(holder) + 1] = reply["shares"][row]
        held = shares_held(f, colluders, victim)
        kinds = {"key": slice(None, KEY_BYTES), "seed": slice(KEY_BYTES, None)}
        open_kind = "key" if victim in dropped else "seed"
        found = {}
        for kind, part in kinds.items():
            shares = {point: share[part] for point, share in held.items()}
            if kind == open_kind:
                shares |= revealed
            points = sorted(shares)[: graph.threshold]
            rows = np.stack([shares[p] for p in points])[:, None] if points else None
            found[kind] = shamir.join(shamir.weights(points), rows)[0] if points else None
        is_seed = found["seed"] is not None and digest(found["seed"]) == bytes(
            advertised["commitment"]
        )
        is_key = found["key"] is not None and public_key(
            X25519PrivateKey.from_private_bytes(found["key"])
        ) == bytes(advertised["keys"][KEY_BYTES:])
        assert (is_key, is_seed) == (victim in dropped, victim not in dropped)


def test_one_colluder_more_than_the_threshold_allows_does_open_a_client(watched):
    """The attack above is one: with enough of the circle it works."""
    f, victim = watched, watched.names[30]
    graph = Graph.of(150, f.rules)
    others = [name for name in circle_of(f, victim) if name != victim][: graph.threshold]
    held = shares_held(f, others, victim)
    [secret] = shamir.join(shamir.weights(list(held)), np.stack(list(held.values()))[:, None])
    assert digest(secret[KEY_BYTES:]) == bytes(f.replies[0, ADVERTISE, victim]["commitment"])
    [fewer] = shamir.join(
        shamir.weights(list(held)[1:]), np.stack(list(held.values())[1:])[:, None]
    )
    assert fewer != secret


def test_of_no_client_are_both_kinds_of_shares_revealed(watched):
    f, dropped = watched, set(watched.names[20:24])
    for (_, stage, holder), reply in f.replies.items():
        if stage is not UNMASK:
            continue
        circle = circle_of(f, holder)
        asked = f.requests[0, UNMASK, holder]
        assert {circle[i] for i in asked["dropped"]} == dropped & set(circle)
        for owner, share in zip(circle, reply["shares"], strict=True):
            whole = f.texts[f.replies[0, ADVERTISE, owner]["keys"].tobytes()]
            mine = whole[circle_of(f, owner).index(holder)]
            half = mine[:KEY_BYTES] if owner in dropped else mine[KEY_BYTES:]
            np.testing.assert_array_equal(share, half)


def test_a_late_vector_stays_covered_by_its_own_mask():
    """Its pair masks are open, and taken off; what is left is uniform, and would not be without."""
    f = sparse_federation(length=2000)
    victim, seeds = f.names[11], {}
    f.lost = [(MASK, victim)]

    def on_request(stage, name, request):
        if stage is SHARE:
            seeds[name] = f.clients[name]._round.seed
        return request

    f.on_request = on_request
    f.total()
    circle = circle_of(f, victim)
    shares = {}
    for holder in circle:
        if (0, UNMASK, holder) in f.replies:
            row = circle_of(f, holder).index(victim)
            shares[circle.index(holder) + 1] = f.replies[0, UNMASK, holder]["shares"][row]
    points = sorted(shares)[: Graph.of(N, f.rules).threshold]
    [key] = shamir.join(shamir.weights(points), np.stack([shares[p] for p in points])[:, None])
    mask_key = X25519PrivateKey.from_private_bytes(key)
    shown, asked = (f.requests[0, stage, victim] for stage in (SHARE, MASK))
    cohort = cohort_digest(RUN, 0, f.rules, N, shown["roster"].tobytes())
    context = context_of(cohort, asked["roll"].tobytes(), QUESTION)
    places = (shown["start"] + np.arange(len(circle))) % N
    mine = int(places[len(circle) // 2])
    vector = f.replies[0, MASK, victim]["masked"].copy()
    pairs = [
        (
            masks.pair_key(mask_key, keys[KEY_BYTES:].tobytes(), b"mask", context, (mine, other)),
            -masks.pair_sign(mine, other),
        )
        for keys, other in zip(shown["keys"], places.tolist(), strict=True)
        if other != mine
    ]
    masks.add_masks(vector, pairs)
    assert byte_uniformity(vector.tobytes()) > UNLIKELY
    masks.add_masks(vector, [(masks.own_key(seeds[victim], context), -1)])
    np.testing.assert_array_equal(vector.view(np.int64), f.vectors[victim])


# Too few.


def test_shares_that_are_left_are_counted_for_each_client():
    """So few stay away that the quorum is met, but all of them hold shares of one client."""
    n, dropouts = 400, 40
    f = sparse_federation(n=n, dropouts=dropouts, colluders=4, length=1)
    graph = Graph.of(n, f.rules)
    silent = graph.size - graph.threshold + 1
    assert silent <= dropouts
    victim = f.names[9]

    def on_reply(stage, name, reply):
        if stage is UNMASK and name in circle_of(f, victim)[:silent]:
            return None
        return reply

    f.on_reply = on_reply
    with pytest.raises(AggregationAborted, match="that hold shares of the keys of"):
        f.total()


def test_survivors_in_groups_apart_are_not_added_up():
    n, dropouts = 400, 40
    f = sparse_federation(n=n, dropouts=dropouts, colluders=4, length=1)
    half = Graph.of(n, f.rules).degree // 2
    assert 2 * half <= dropouts
    order = {}

    def on_request(stage, name, request):
        if stage is SHARE:
            order[(request["start"] + half) % n] = name
        return request

    def on_reply(stage, name, reply):
        if stage is not MASK:
            return reply
        gone = {order[i] for i in (*range(half), *range(n // 2, n // 2 + half))}
        return None if name in gone else reply

    f.on_request, f.on_reply = on_request, on_reply
    with pytest.raises(AggregationAborted, match="in groups apart from each other"):
        f.total()
    assert not [key for key, _ in f.replies.items() if key[1] is UNMASK]


def test_one_neighbour_with_wrong_shares_is_done_without():
    f = sparse_federation()

    def on_reply(stage, name, reply):
        if stage is UNMASK and name == f.names[50]:
            return {"shares": reply["shares"] ^ 1}
        return reply

    f.on_reply = on_reply
    assert is_exact(f, f.total())


def test_shares_of_too_few_members_are_not_taken():
    f = sparse_federation()

    def on_reply(stage, name, reply):
        if stage is UNMASK and name == f.names[50]:
            return {"shares": reply["shares"][:-1]}
        return reply

    f.on_reply = on_reply
    assert is_exact(f, f.total())
    [(stage, name, error)] = f.refusals
    assert (stage, name) == (UNMASK, f.names[50])
    assert "shares came, of" in str(error)


# Who may have how many clients.


def spec_for(n, **more):
    given = {
        "epsilon": 4.0,
        "delta": 1e-6,
        "ranges": [(-1, 1)],
        "protection": "masking",
        "min_survivors": n - n // 10,
        "colluders": n // 100,
    }
    return PrivacySpec(**given | more)


def test_ten_thousand_clients_are_allowed_with_masking_alone():
    n = 10_000
    assert with_quorum(spec_for(n), n).min_survivors == 9000
    assert with_quorum(spec_for(n, min_survivors=None), n).min_survivors == 6667
    with pytest.raises(ParameterError, match=r"a cohort of 10000 clients.*3 to 4096"):
        with_quorum(spec_for(n, protection="ckks"), n)
    with pytest.raises(ParameterError, match="protects nobody from this server"):
        with_quorum(spec_for(n, active_server=True), n)
    with pytest.raises(ParameterError, match="3 to 65536"):
        with_quorum(spec_for(LARGEST_FEDERATION + 1), LARGEST_FEDERATION + 1)


def test_a_server_asks_nobody_where_the_rules_allow_no_graph():
    names = [f"client {i}" for i in range(LARGEST_COHORT + 1)]
    server = Masking(Rules(LARGEST_COHORT, 1, active_server=True))
    ask, question = mock.Mock(), mock.Mock()
    with pytest.raises(ParameterError, match="protects nobody from this server"):
        server.total(ask, names, question)
    ask.assert_not_called()


def test_clients_of_an_active_server_have_all_others_as_neighbours():
    n = SPARSE_FROM + 1
    rules = Rules(n - 5, 1, active_server=True)
    assert Graph.of(n, rules).is_complete
    assert not Graph.of(n, replace(rules, active_server=False)).is_complete
