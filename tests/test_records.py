import subprocess
import sys
import traceback

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.records import Clients, check_clients, check_records, clients_from_frame


def test_records_become_contiguous_float64():
    for X in (np.asfortranarray(np.ones((4, 3), dtype=np.int8)), [[1, 2, 3]] * 4):
        out = check_records(X, "a")
        assert out.dtype == np.float64
        assert out.flags.c_contiguous
        assert out.shape == (4, 3)


def test_an_array_that_fits_is_not_copied():
    X = np.ones((4, 3))
    assert np.shares_memory(check_records(X, "a"), X)


def test_object_arrays_of_numbers_and_nullable_columns_convert():
    assert check_records(np.array([[1, 2.5]], dtype=object), "a").tolist() == [[1.0, 2.5]]
    frame = pd.DataFrame({"n": pd.array([1, 2], dtype="Int64"), "b": [True, False]})
    assert check_records(frame, "a").tolist() == [[1.0, 1.0], [2.0, 0.0]]


# The fragments are what scikit-learn's own estimator checks look for.
@pytest.mark.parametrize(
    ("X", "fragment"),
    [
        (np.arange(3.0), r"Reshape your data.*reshape\(-1, 1\).*list of 2-D arrays"),
        (3.0, "got 0D array"),
        (None, "got 0D array|no number"),
        (np.ones((2, 2, 2)), r"dim 3.*reshape\(len\(X\), -1\)"),
        (np.ones((0, 3)), r"0 sample\(s\) \(shape=\(0, 3\)\) while a minimum of 1 is required"),
        (np.ones((12, 0)), r"0 feature\(s\) \(shape=\(12, 0\)\) while a minimum of 1 is required."),
        (np.ones((2, 2), dtype=complex), "Complex data not supported"),
        (pd.DataFrame({"z": [1j]}), "Complex data not supported"),
        (sp.csr_array(np.eye(3)), r"Sparse.*toarray"),
        (sp.coo_matrix(np.eye(3)), r"Sparse.*toarray"),
        ([[1.0, 2.0], [3.0]], "unequal length"),
        ([["x"]], "do not read as numbers"),
        (np.array([["2020-01-01"]], dtype="M8[D]"), "not numbers"),
        (np.array([[{"foo": "bar"}]], dtype=object), "argument must be .* string.* number"),
        (np.array([[10**400]], dtype=object), "do not read as numbers"),
        (np.array([[1.0], [np.nan], [np.inf]]), "2 of 3 records contain NaN or infinity"),
        (np.ma.array([[1.0], [2.0]], mask=[[False], [True]]), "1 of 2 records contain NaN"),
        (pd.DataFrame({"n": pd.array([1, None], dtype="Int64")}), r"column 'n' \(1 records\)"),
        (pd.DataFrame({"t": ["x"]}), "column 't' is not numeric"),
        (pd.Series([1.0, 2.0]), "Reshape your data"),
    ],
)  # fmt: skip
def test_unusable_records_are_refused_with_the_clients_name(X, fragment):
    with pytest.raises(DataError, match=rf"(?s)^oslo: .*({fragment})"):
        check_records(X, "oslo")


def test_objects_that_are_no_numbers_raise_a_type_error_as_scikit_learn_expects():
    with pytest.raises(TypeError):
        check_records(np.array([[{"foo": "bar"}]], dtype=object), "oslo")


def test_a_differing_width_is_refused_in_scikit_learns_words():
    with pytest.raises(DataError, match=r"X has 1 features, but \w+ is expecting 3 features as in"):
        check_records(np.ones((2, 1)), "oslo", n_features=3)


@pytest.mark.parametrize(
    "X",
    [
        np.array([["secret-1234"]]),
        np.array([["secret-1234", 1.0]], dtype=object),
        np.array([1234.5, 1.0]),
        np.array([[1234.5 + 1j]]),
        np.array([[1234.5, np.nan]]),
        [["secret-1234"], [1, 2]],
        pd.DataFrame({"a": ["secret-1234"]}),
        pd.DataFrame({"a": [1234.5, np.inf]}),
    ],
)
def test_no_value_of_a_record_appears_in_a_traceback(X):
    with pytest.raises(DataError) as caught:
        check_records(X, "oslo")
    # Chained exceptions count too, even suppressed ones.
    shown = "".join(traceback.format_exception_only(caught.value))
    chain = caught.value.__context__
    while chain is not None:
        shown += str(chain)
        chain = chain.__context__
    assert "1234" not in shown


def test_long_lists_of_columns_are_cut_short():
    with pytest.raises(DataError, match=r"'4' \(1 records\) and 95 more"):
        check_records(np.full((1, 100), np.nan), "a")


def test_lists_are_numbered_and_mappings_keep_their_names():
    assert list(check_clients([np.ones((2, 2)), np.ones((3, 2))])) == ["client 0", "client 1"]
    assert list(check_clients({"b": np.ones((2, 2)), 7: np.ones((3, 2))})) == ["b", "7"]


@pytest.mark.parametrize(
    ("clients", "fragment"),
    [
        (np.ones((4, 2)), r"bare ndarray.*\[X\]"),
        (np.ones((4, 2, 2)), r"bare ndarray"),
        (sp.csr_array(np.eye(3)), "bare csr_array"),
        ("oslo.csv", "bare str"),
        (iter([np.ones((4, 2))]), "list with one 2-D array"),
        ([], "no clients"),
        ({}, "no clients"),
        ([[1.0, 2.0], [3.0, 4.0]], "client 0: .*list of 2-D arrays"),
        ({1: np.ones((1, 2)), "1": np.ones((1, 2))}, "two clients are called '1'"),
        (
            {"oslo": np.ones((1, 2)), "bergen": np.ones((1, 3))},
            "oslo has 2 features and bergen has 3",
        ),
    ],
)
def test_unusable_federations_are_refused(clients, fragment):
    with pytest.raises(DataError, match=rf"(?s){fragment}"):
        check_clients(clients)


def test_a_frame_and_its_client_column_go_together():
    with pytest.raises(ParameterError, match="pass client_column"):
        check_clients(pd.DataFrame({"a": [1.0]}))
    with pytest.raises(ParameterError, match="needs a DataFrame"):
        check_clients([np.ones((1, 1))], client_column="site")


def test_frames_of_several_clients_are_matched_by_column_name():
    oslo, bergen = pd.DataFrame({"a": [1], "b": [2]}), pd.DataFrame({"b": [4], "a": [3]})
    clients = check_clients({"oslo": oslo, "bergen": bergen})
    assert clients["bergen"].tolist() == [[3.0, 4.0]]
    assert clients.feature_names == ("a", "b")
    with pytest.raises(DataError, match="bergen: column 'b' is missing"):
        check_clients({"oslo": oslo, "bergen": bergen[["a"]]})
    with pytest.raises(DataError, match="bergen: column 'b' is not in oslo"):
        check_clients({"oslo": oslo[["a"]], "bergen": bergen})


def frame(**changes):
    columns = {"site": ["x", "y", "x"], "a": [1, 2, 3], "b": [4.0, 5.0, 6.0]} | changes
    return pd.DataFrame(columns)


def test_a_frame_is_split_by_its_client_column_in_order_of_appearance():
    clients = clients_from_frame(frame(site=["y", "x", "y"]), "site")
    assert list(clients) == ["y", "x"]
    assert clients["y"].tolist() == [[1.0, 4.0], [3.0, 6.0]]
    assert clients.feature_names == ("a", "b")
    assert check_clients(frame(), "site")["y"].tolist() == [[2.0, 5.0]]


def test_named_columns_are_taken_in_the_order_named():
    clients = clients_from_frame(frame(), "site", columns=["b", "a"])
    assert clients["y"].tolist() == [[5.0, 2.0]]
    assert clients.feature_names == ("b", "a")


@pytest.mark.parametrize(
    ("table", "arguments", "error", "fragment"),
    [
        (frame(), {"client_column": "ward"}, DataError, "no client column 'ward'.*'site'"),
        (frame(), {"columns": ["a", "c"]}, DataError, "column 'c' is missing"),
        (frame(), {"columns": ["a", "site"]}, ParameterError, "both the client column"),
        (frame(), {"columns": "ab"}, ParameterError, "list of column names"),
        (frame(b=list("uvw")), {}, DataError, "column 'b' is not numeric"),
        (frame(b=[1, np.nan, 1]), {}, DataError, r"y: 1 of 1 records.*column 'b' \(1 records\)"),
        (frame(site=["x", None, None]), {}, DataError, "2 of 3 records have nothing"),
        (frame().iloc[:0], {}, DataError, "no clients"),
        (frame().iloc[:, [0, 1, 1]], {}, DataError, "column 'a' comes twice"),
        (frame(site=pd.Series([1, "1", 1], dtype=object)), {}, DataError, "called '1'"),
    ],
)
def test_unusable_frames_are_refused(table, arguments, error, fragment):
    with pytest.raises(error, match=fragment):
        clients_from_frame(table, **{"client_column": "site"} | arguments)


def test_checking_records_needs_neither_pandas_nor_scikit_learn():
    code = "import sys, secure_fedclust.records; print({'pandas', 'sklearn'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert out.stdout.strip() == "set()"


def test_records_made_by_hand_are_checked_and_keep_their_names():
    good = Clients({"a": np.ones((2, 2))}, ["age", "bmi"])
    assert check_clients(good).feature_names == ("age", "bmi")
    with pytest.raises(DataError, match="a: 1 of 1 records contain NaN"):
        check_clients(Clients({"a": np.array([[np.nan]])}))


def test_records_do_not_show_in_a_repr():
    clients = check_clients({"oslo": [[61.5, 32.25]], "bergen": [[1.0, 2.0], [3.0, 4.0]]})
    assert repr(clients) == "Clients(oslo: 1 records, bergen: 2 records)"
