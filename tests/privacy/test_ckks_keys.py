"""Key files of encrypted sums, and that the secret key is said nowhere."""

import base64
import copy
import errno
import json
import logging
import math
import os
import pickle
import shutil
import stat
import sys
import tempfile
from unittest import mock

import numpy as np
import pytest
import tenseal as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust.errors import AggregationAborted, ParameterError, ProtocolError
from secure_fedclust.privacy import ckks
from secure_fedclust.privacy.ckks import KeyHolder
from secure_fedclust.privacy.ckks_parameters import PRESETS

from .ckks_world import (
    LARGE,
    RUN,
    SMALL,
    World,
    assert_has_forgotten,
    contexts,
    encrypted,
    filled,
    flipped,
    key_in,
    leaked,
    ones,
    pieces,
)


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture
def path(tmp_path):
    """Of a key file, alone in its folder."""
    folder = tmp_path / "keys"
    folder.mkdir()
    return folder / "run.json"


@pytest.fixture
def holder(path):
    """Has given out a key of each preset, and opened round 3."""
    holder = KeyHolder(RUN, path)
    for preset in PRESETS:
        holder.public_key(preset)
    holder.open(3, SMALL, encrypted(holder, SMALL))
    return holder


# The key file.


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def at_every_line(look, action):
    """Do something, and look whenever a line has been executed, of what is called, too."""

    def trace(frame, event, argument):
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_no_key_can_be_read_by_others_at_any_moment(path, umask):
    seen = set()

    def look():
        seen.update((each.name == path.name, mode(each)) for each in path.parent.iterdir())

    def run():
        holder = KeyHolder(RUN, path)
        holder.open(0, SMALL, encrypted(holder, SMALL))

    before = os.umask(umask)
    try:
        at_every_line(look, run)
    finally:
        os.umask(before)
    assert seen == {(False, 0o600), (True, 0o600)}  # It saw the file being written, too.
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert mode(path) == 0o600


def test_a_key_file_is_whole_at_any_moment(path, holder):
    contents = []

    def look():
        if not contents or contents[-1] != path.read_bytes():
            contents.append(path.read_bytes())

    at_every_line(look, lambda: holder.open(4, SMALL, encrypted(holder, SMALL)))
    # Wherever the key holder stops, it has noted a round or it has not opened it.
    assert [json.loads(each)["opened"] for each in contents] == [3, 4]
    for content in contents:
        path.write_bytes(content)
        KeyHolder.load(path, RUN)


def test_a_round_is_noted_on_disk_before_it_is_opened(path, holder):
    noted, synced = [], []
    decrypt, fsync = ts.CKKSVector.decrypt, os.fsync

    def synchronised(file):
        synced.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def opened(vector, *arguments):
        noted.append((json.loads(path.read_text())["opened"], *synced))
        return decrypt(vector, *arguments)

    parts = encrypted(holder, SMALL)
    with (
        mock.patch.object(ts.CKKSVector, "decrypt", opened),
        mock.patch.object(os, "fsync", synchronised),
    ):
        holder.open(7, SMALL, parts)
    assert noted == [(7, "file", "folder")]


def test_a_key_holder_goes_on_after_a_restart(path, holder):
    before = {preset: holder.public_key(preset) for preset in PRESETS}
    parts = {each: encrypted(holder, each) for each in (SMALL, LARGE)}
    for kind in (str, type(path)):
        again = KeyHolder.load(kind(path), RUN)
        assert (again.run, again.opened) == (RUN, 3)
        # Byte for byte: clients refuse a second key in a run.
        assert {preset: again.public_key(preset) for preset in PRESETS} == before
        for number in (3, 2, 0):
            with pytest.raises(ProtocolError, match="round 3 was opened already"):
                again.open(number, SMALL, parts[SMALL])
    np.testing.assert_array_equal(again.open(4, LARGE, parts[LARGE]), ones(LARGE))
    np.testing.assert_array_equal(again.open(5, SMALL, parts[SMALL]), ones(SMALL))
    # And what the second one has opened, a third one knows.
    third = KeyHolder.load(path, RUN)
    assert third.opened == 5
    with pytest.raises(ProtocolError, match="one sum a round"):
        third.open(5, SMALL, parts[SMALL])
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_keys_are_thrown_away_on_disk_as_well(path, holder):
    honest = {parameters: encrypted(holder, parameters) for parameters in (SMALL, LARGE)}
    secret = key_in(path, SMALL.preset)
    with pytest.raises(AggregationAborted):
        holder.open(4, SMALL, World().encrypt(SMALL, ones(SMALL)))
    assert json.loads(path.read_text())["keys"] == {}
    assert pieces(path.read_text(), secret) == []
    again = KeyHolder.load(path, RUN)
    assert again.opened == 4
    assert_has_forgotten(again, honest)


def test_keys_that_were_thrown_away_are_not_made_again_after_a_restart(path, holder):
    honest = {SMALL: encrypted(holder, SMALL)}
    holder.forget()
    assert_has_forgotten(KeyHolder.load(path, RUN), honest)


def test_a_key_holder_knows_its_server_after_a_restart(path, holder):
    holder.serve(b"the server's key")
    assert KeyHolder.load(path, RUN).aggregator == b"the server's key"


def test_keys_made_after_a_restart_are_kept_as_well(path):
    first = KeyHolder(RUN, path)
    small = first.public_key(SMALL.preset)
    large = KeyHolder.load(path, RUN).public_key(LARGE.preset)
    third = KeyHolder.load(path, RUN)
    assert [third.public_key(preset) for preset in PRESETS] == [small, large]


def test_keys_of_an_earlier_run_are_not_taken_for_a_new_one(path, holder):
    before = path.read_bytes()
    with pytest.raises(ParameterError, match=r"^key holder: .* exists; keys are fresh"):
        KeyHolder("run 2", path)
    with pytest.raises(ParameterError, match=r"^key holder: .* of run run 1, this is run run 2: "):
        KeyHolder.load(path, "run 2")
    assert path.read_bytes() == before


@pytest.mark.parametrize("lax", [0o640, 0o604, 0o610, 0o601, 0o620, 0o602, 0o644, 0o666])
def test_a_key_file_that_others_may_touch_is_refused(path, holder, lax):
    path.chmod(lax)
    with pytest.raises(ParameterError, match=r"^key holder: .* read by others"):
        KeyHolder.load(path, RUN)


@pytest.mark.parametrize("own", [0o600, 0o400])
def test_a_key_file_of_its_owner_is_taken(path, holder, own):
    path.chmod(own)
    assert KeyHolder.load(path, RUN).opened == 3


def test_what_is_no_file_is_no_key_file(path):
    path.mkdir(mode=0o700)
    with pytest.raises(ParameterError, match=r"^key holder: .* is not a key file"):
        KeyHolder.load(path, RUN)
    for each in (path / "missing", path.parent / "missing" / "keys"):
        with pytest.raises(ParameterError, match=r"^key holder: .* does not exist"):
            KeyHolder.load(each, RUN)


def changed_file(path, *, without=(), **changes):
    """Another key file, with something else in it and a checksum that is right."""
    content = json.loads(path.read_text()) | changes
    for name in ("checksum", *without):
        del content[name]
    return written(path, content | {"checksum": ckks._checksum(content)})


def written(path, content):
    """Another key file with this content."""
    other = path.with_name("changed")
    other.write_text(json.dumps(content))
    other.chmod(0o600)
    return other


def test_a_key_file_with_nothing_changed_in_it_is_taken(kept):
    path, holder = kept
    loaded = KeyHolder.load(changed_file(path), RUN)
    assert (loaded.opened, set(loaded._contexts)) == (3, set(holder._contexts))


@pytest.mark.parametrize("form", ["secure_fedclust ckks keys 2", "secure_fedclust ckks keys", 1])
def test_a_key_file_of_another_version_is_refused(path, holder, form):
    with pytest.raises(ParameterError, match=r"^key holder: .* another version"):
        KeyHolder.load(changed_file(path, format=form), RUN)


@pytest.mark.parametrize("name", ["format", "run", "opened", "aggregator", "has_forgotten", "keys"])
def test_a_key_file_with_something_missing_is_refused(kept, name):
    path, _ = kept
    with pytest.raises(ParameterError, match=r"^key holder: .* not a key file"):
        KeyHolder.load(changed_file(path, without=[name]), RUN)


EDITS = {
    "run": [None, 1, "", "run 2", ["run 1"]],
    "opened": [None, -1, 2, 2.9, 3.0, "3", True, [3], math.nan],
    "aggregator": ["", "00", 0],
    "has_forgotten": [None, 0, True, "false"],
    "keys": [None, [], {}, ""],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EDITS.items() for value in values]
)
def test_a_key_file_that_was_edited_by_hand_is_refused(kept, name, value):
    path, _ = kept
    content = json.loads(path.read_text())
    with pytest.raises(ParameterError, match=r"^key holder: .* not a key file"):
        KeyHolder.load(written(path, content | {name: value}), RUN)


def wrong_keys(path):
    """Keys that a key file could have instead of its own, as they are written in it."""
    keys = json.loads(path.read_text())["keys"]
    small, large = (contexts(preset) for preset in PRESETS)

    def text(data):
        return base64.b64encode(data).decode()

    return {
        "of the other preset": {"0": keys["1"]},
        "swapped": {"0": keys["1"], "1": keys["0"]},
        "of a preset that there is not": {"2": keys["0"]},
        "without a number": {"small": keys["0"]},
        "a list": [keys["0"]],
        "public only": {"0": text(small["public key"])},
        "none": {"0": text(large["no key"])},
        "of no bytes": {"0": ""},
        "no text": {"0": 5},
        "not in base 64": {"0": keys["0"][:-4] + "-!!-"},
        "truncated": {"0": keys["0"][:-400]},
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A key file that is not written to, and the key holder that has written it."""
    path = tmp_path_factory.mktemp("kept") / "keys"
    holder = KeyHolder(RUN, path)
    for preset in PRESETS:
        holder.public_key(preset)
    holder.open(3, SMALL, encrypted(holder, SMALL))
    return path, holder


WRONG_KEYS = (
    *("of the other preset", "swapped", "of a preset that there is not", "without a number"),
    *("a list", "public only", "none", "of no bytes", "no text", "not in base 64", "truncated"),
)


@pytest.mark.parametrize("what", WRONG_KEYS)
def test_a_key_file_with_other_keys_than_it_says_is_refused(kept, what):
    path, _ = kept
    with pytest.raises(ParameterError, match=r"^key holder: ") as caught:
        KeyHolder.load(changed_file(path, keys=wrong_keys(path)[what]), RUN)
    assert leaked(caught.value, path.read_bytes()) == []


def test_a_key_file_without_the_public_keys_is_refused(kept):
    # The library would crash when it is asked for one.
    path, holder = kept
    context = holder._contexts[SMALL.preset]
    key = base64.b64encode(context.serialize(False, True, False, False)).decode()
    with pytest.raises(ParameterError, match=r"^key holder: "):
        KeyHolder.load(changed_file(path, keys={"0": key}), RUN)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_key_file_is_refused(kept, data):
    path, _ = kept
    raw = path.read_bytes()
    damaged = raw
    for _ in range(data.draw(st.integers(0, 3))):
        anywhere = st.integers(0, len(raw) - 1) | st.integers(0, 200)
        damaged = flipped(damaged, 8 * data.draw(anywhere) + data.draw(st.integers(0, 7)))
    cut = data.draw(st.just(len(raw)) | st.integers(0, len(raw) - 1))
    other = path.with_name("damaged")
    other.write_bytes(damaged[:cut])
    other.chmod(0o600)
    try:
        loaded = KeyHolder.load(other, RUN)
    except ParameterError as error:
        assert str(error).startswith("key holder: ")
        assert leaked(error, raw) == []
        return
    # Nothing is taken but what says the same.
    assert json.loads(damaged[:cut]) == json.loads(raw)
    assert loaded.opened == 3


def test_a_flipped_bit_does_not_open_a_round_again(kept):
    path, _ = kept
    raw = path.read_bytes()
    start = raw.index(b'"opened": 3') + len(b'"opened": ')
    other = path.with_name("flipped")
    for bit in range(8):
        other.write_bytes(flipped(raw, 8 * start + bit))
        other.chmod(0o600)
        try:
            loaded = KeyHolder.load(other, RUN)
        except ParameterError:
            continue
        assert loaded.opened >= 3


# Places that cannot be written to.


def nowhere(path):
    """Where no file can be, by reason."""
    (path.parent / "file").write_text("")
    return {
        "a folder that is missing": path.parent / "missing" / "keys",
        "a file for a folder": path.parent / "file" / "keys",
        "too long a name": path.parent / ("k" * 255),
    }


@pytest.mark.parametrize(
    "where", ["a folder that is missing", "a file for a folder", "too long a name"]
)
def test_a_key_holder_that_cannot_keep_its_keys_does_not_begin(path, where):
    with pytest.raises(ParameterError, match=r"^key holder: cannot write"):
        KeyHolder(RUN, nowhere(path)[where])
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_keys_that_cannot_be_kept_are_not_given_out(path):
    holder = KeyHolder(RUN, path)
    shutil.rmtree(path.parent)
    for _ in range(2):
        with pytest.raises(ParameterError, match=r"^key holder: cannot write"):
            holder.public_key(SMALL.preset)
    path.parent.mkdir()
    key = holder.public_key(SMALL.preset)
    assert KeyHolder.load(path, RUN).public_key(SMALL.preset) == key


@pytest.mark.parametrize("how", ["folder gone", "disk full", "no descriptor", "no rename"])
def test_nothing_is_opened_that_cannot_be_noted(path, holder, how):
    parts = encrypted(holder, SMALL)
    full = OSError(errno.ENOSPC, "No space left on device")
    patches = {
        "folder gone": mock.patch.object(os, "getpid", os.getpid),
        "disk full": mock.patch.object(os, "fsync", side_effect=full),
        "no descriptor": mock.patch.object(tempfile, "mkstemp", side_effect=full),
        "no rename": mock.patch.object(os, "replace", side_effect=full),
    }
    before = path.read_bytes()
    if how == "folder gone":
        shutil.rmtree(path.parent)
    with patches[how], mock.patch.object(ts.CKKSVector, "decrypt") as decrypted:
        with pytest.raises(ParameterError, match=r"^key holder: cannot write .*: No s") as caught:
            holder.open(4, SMALL, parts)
        decrypted.assert_not_called()
    assert leaked(caught.value, before) == []
    if how == "folder gone":
        return
    # What was there before is still there, and nothing else.
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before
    # The key holder goes on when it can write again.
    np.testing.assert_array_equal(holder.open(5, SMALL, parts), ones(SMALL))
    assert KeyHolder.load(path, RUN).opened == 5


def test_what_a_crash_has_left_does_not_get_in_the_way(path, holder):
    # Where process numbers repeat, as in containers, names that are made of them would, too.
    for name in (f".{path.name}.{os.getpid()}", f".{path.name}.", f"{path.name}.tmp"):
        path.with_name(name).write_bytes(b"half of a ke")
    holder.open(4, SMALL, encrypted(holder, SMALL))
    assert KeyHolder.load(path, RUN).opened == 4


# The secret key is said nowhere.


def test_a_leak_would_be_found():
    secret = contexts(SMALL.preset)["secret key"]
    encoded = base64.b64encode(secret).decode()
    for text in (encoded[500:560], repr(secret[1000:1100]), f"... {secret[250:300]!r}"):
        assert leaked(ValueError(text), secret)
    try:
        json.loads('{"keys": "' + encoded)
    except json.JSONDecodeError as error:
        assert leaked(error, secret)
    assert leaked(ValueError("nothing of the kind is in here, however long it is"), secret) == []


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "not UTF-8",
        "no key",
    ],
)
def test_an_unreadable_key_file_is_not_quoted(kept, how):
    path, _ = kept
    raw = path.read_bytes()
    other = path.with_name("unreadable")
    other.write_bytes(
        {
            "truncated": raw[:-5],
            "not UTF-8": raw[:-5] + b"\xff",
            "no key": raw.replace(b'"0": "', b'"0": "!'),
        }[how]
    )
    other.chmod(0o600)
    with pytest.raises(ParameterError, match="is not a key file") as caught:
        KeyHolder.load(other, RUN)
    assert leaked(caught.value, raw) == []
    # What Python keeps of the first error is not shown, but can be looked at, and sent elsewhere.
    assert caught.value.__context__ is None or leaked(caught.value.__context__, raw) == []


def test_a_key_holder_says_its_run_and_round_only(kept):
    _, holder = kept
    assert repr(holder) == str(holder) == f"{holder}" == "KeyHolder(run='run 1', opened=3)"


def test_encryptor_and_aggregator_say_what_they_are_for(world):
    assert repr(world.encryptor(SMALL.preset)) == "Encryptor((4096, [60, 49]))"
    assert repr(filled(world, SMALL)) == "Aggregator(1 of 3 vectors)"


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda holder: copy.deepcopy([holder])],
    ids=["copy", "deepcopy", "pickle", "in a list"],
)
def test_a_key_holder_is_not_copied(kept, copied):
    _, holder = kept
    with pytest.raises(TypeError, match="not copied or pickled"):
        copied(holder)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not copied or pickled"):
            pickle.dumps(holder, protocol)


def test_nothing_is_logged_or_printed(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "keys"
    holder = KeyHolder(RUN, path)
    parts = encrypted(holder, SMALL)
    holder.open(0, SMALL, parts)
    KeyHolder.load(path, RUN).open(1, SMALL, parts)
    for number, bad in ((0, parts), (2, [b""]), (3, World().encrypt(SMALL, ones(SMALL)))):
        with pytest.raises(ProtocolError):
            holder.open(number, SMALL, bad)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ParameterError):
        KeyHolder.load(path, RUN)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
