import numpy as np
import pytest

from secure_fedclust.datasets import benchmark_names, load_benchmark, read_clients
from secure_fedclust.datasets.loaders import DATA_VARIABLE
from secure_fedclust.errors import DataError, ParameterError


def test_every_benchmark_loads(data_dir):
    names = benchmark_names(data_dir)
    assert {"s1", "waveform_v1", "mnist_vae_emb10"} <= set(names)
    for name in set(names) - {"fmnist_train10k", "fmnist_test10k", "mnist_train10k"}:
        data = load_benchmark(name, data_dir)
        assert data.name == name
        assert data.X.dtype == np.float64
        assert data.X.flags.c_contiguous
        assert data.y.dtype == np.int64
        assert data.y.shape == (len(data.X),)
        assert not {"X", "y", "centers"} & set(data.extras)


def test_published_centres_are_kept_apart_from_class_means(data_dir):
    s1 = load_benchmark("s1", data_dir)
    assert s1.centers.shape == s1.extras["class_means"].shape == (15, 2)
    assert not np.allclose(s1.centers, s1.extras["class_means"])
    assert load_benchmark("iris", data_dir).centers is None
    assert set(load_benchmark("abalone", data_dir).extras) == {"y_sex", "y_fedgem8"}


@pytest.fixture
def tiny(tmp_path):
    np.savez(tmp_path / "tiny.npz", X=np.eye(3, dtype=np.float32), y=np.arange(3, dtype=np.int32))
    return tmp_path


def test_the_folder_is_the_argument_then_the_variable_then_shared_data(tiny, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    assert benchmark_names(tiny) == ["tiny"]
    monkeypatch.setenv(DATA_VARIABLE, str(tiny))
    assert benchmark_names() == ["tiny"]
    assert load_benchmark("tiny").X.dtype == np.float64
    monkeypatch.delenv(DATA_VARIABLE)
    (tiny / "shared" / "data").mkdir(parents=True)
    (tiny / "work").mkdir()
    (tiny / "tiny.npz").rename(tiny / "shared" / "data" / "tiny.npz")
    monkeypatch.chdir(tiny / "work")
    assert benchmark_names() == ["tiny"]


def test_an_absent_folder_says_where_it_looked_and_how_to_point_elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(DataError, match=f"{tmp_path}/shared/data.*data_dir.*{DATA_VARIABLE}"):
        load_benchmark("s1")


@pytest.mark.parametrize("name", ["nosuch", "tiny.npz", "../tiny", ""])
def test_an_unknown_set_lists_those_there_are(tiny, name):
    with pytest.raises(DataError, match="there are tiny"):
        load_benchmark(name, tiny)


def test_pickled_arrays_are_not_loaded(tmp_path):
    np.savez(tmp_path / "bad.npz", X=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match="cannot be read"):
        load_benchmark("bad", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_clients(tmp_path / "bad.npz")


def test_a_benchmark_without_labels_is_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", X=np.eye(2))
    with pytest.raises(DataError, match="no array y"):
        load_benchmark("bad", tmp_path)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_a_csv_is_split_by_its_client_column_and_names_stay_as_written(tmp_path):
    write(tmp_path, all="site,a,b\n007,1,2\n7,3,4\n007,5,6\n")
    clients = read_clients(tmp_path / "all.csv", "site")
    assert list(clients) == ["007", "7"]
    assert clients["007"].tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert clients.feature_names == ("a", "b")
    assert read_clients(str(tmp_path / "all.csv"), "site", ["b"])["7"].tolist() == [[4.0]]


def test_a_folder_has_one_client_a_file_and_columns_are_matched_by_name(tmp_path):
    write(tmp_path, oslo="a,b\n1,2\n", bergen="b,a\n4,3\n")
    (tmp_path / "notes.txt").write_text("not data")
    clients = read_clients(tmp_path)
    assert list(clients) == ["bergen", "oslo"]
    assert clients.feature_names == ("b", "a")
    assert clients["oslo"].tolist() == [[2.0, 1.0]]


def test_a_list_keeps_its_order(tmp_path):
    write(tmp_path, oslo="a\n1\n", bergen="a\n2\n")
    clients = read_clients([tmp_path / "oslo.csv", str(tmp_path / "bergen.csv")])
    assert list(clients) == ["oslo", "bergen"]


def test_chosen_columns_may_be_among_others_that_differ(tmp_path):
    write(tmp_path, oslo="a,b\n1,2\n", bergen="c,a\nx,3\n")
    assert read_clients(tmp_path, columns=["a"])["bergen"].tolist() == [[3.0]]


def test_each_array_of_an_npz_is_a_client(tmp_path):
    np.savez(tmp_path / "all.npz", oslo=np.ones((2, 3)), bergen=np.zeros((1, 3)))
    clients = read_clients(tmp_path / "all.npz")
    assert {name: X.shape for name, X in clients.items()} == {"oslo": (2, 3), "bergen": (1, 3)}
    assert clients.feature_names is None


def test_npz_files_hold_one_client_each(tmp_path):
    np.savez(tmp_path / "oslo.npz", records=np.ones((2, 3)))
    np.savez(tmp_path / "bergen.npz", X=np.ones((1, 3)), y=np.zeros(1))
    assert list(read_clients(tmp_path)) == ["bergen", "oslo"]
    np.savez(tmp_path / "bergen.npz", a=np.ones((1, 3)), b=np.zeros(1))
    with pytest.raises(DataError, match="2 arrays"):
        read_clients(tmp_path)


@pytest.mark.parametrize(
    ("files", "fragment"),
    [
        ({"oslo": "a,b\n1,2\n", "pisa": "a\n1\n"}, "pisa: column 'b' is missing"),
        ({"oslo": "a\n1\n", "pisa": "a,b\n1,2\n"}, "pisa: column 'b' is not in oslo"),
        ({"oslo": "a\n1\n", "pisa": "a\nsecret\n"}, "pisa: column 'a' is not numeric"),
        ({"oslo": "a,b\n1,2\n,4\n,\n"}, r"2 of 3 records.*'a' \(2 records\), 'b' \(1 records\)"),
        ({"oslo": "a\ninf\n"}, "oslo: 1 of 1 records"),
        ({"oslo": "a\n1\n", "pisa": "a\n"}, r"pisa.csv has a header line and no records"),
        ({"oslo": ""}, "oslo.csv cannot be read as CSV"),
        ({"oslo": "a,b\n1,2\n1,2,3,4\n"}, "oslo.csv cannot be read as CSV"),
        ({"oslo": "a\n1,secret\n"}, "more fields"),
        ({}, "no .csv or .npz files"),
    ],
)
def test_unusable_files_are_refused_without_quoting_them(tmp_path, files, fragment):
    with pytest.raises(DataError, match=fragment) as caught:
        read_clients(write(tmp_path, **files))
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_two_files_of_one_name_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    write(tmp_path, oslo="a\n1\n")
    write(tmp_path / "x", oslo="a\n1\n")
    with pytest.raises(DataError, match="two clients are called 'oslo'"):
        read_clients([tmp_path / "oslo.csv", tmp_path / "x" / "oslo.csv"])


def test_csv_and_npz_do_not_mix(tmp_path):
    write(tmp_path, oslo="a\n1\n")
    np.savez(tmp_path / "pisa.npz", X=np.ones((1, 1)))
    with pytest.raises(DataError, match=r"both \.csv and \.npz"):
        read_clients(tmp_path)


def test_absent_and_unknown_files_are_named(tmp_path):
    for source in (tmp_path / "no.csv", [tmp_path / "no.csv"], tmp_path / "no.npz"):
        with pytest.raises(DataError, match="there is no file"):
            read_clients(source, "site" if source == tmp_path / "no.csv" else None)
    (tmp_path / "data.xlsx").write_text("")
    with pytest.raises(DataError, match="neither a folder"):
        read_clients(tmp_path / "data.xlsx")
    with pytest.raises(DataError, match="no clients"):
        read_clients([])


def test_a_broken_npz_is_refused(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not a zip file")
    with pytest.raises(DataError, match="cannot be read"):
        read_clients(tmp_path / "broken.npz")
    for text in ("hello", ""):
        (tmp_path / "text.npz").write_text(text)
        with pytest.raises(DataError, match="cannot be read"):
            read_clients(tmp_path / "text.npz")
    with open(tmp_path / "plain.npz", "wb") as file:
        np.save(file, np.ones((2, 2)))
    with pytest.raises(DataError, match="cannot be read"):
        read_clients(tmp_path / "plain.npz")


def test_arguments_that_do_not_fit_the_source_are_refused(tmp_path):
    write(tmp_path, oslo="site,a\nx,1\n")
    np.savez(tmp_path / "all.npz", oslo=np.ones((2, 3)))
    with pytest.raises(ParameterError, match="pass client_column"):
        read_clients(tmp_path / "oslo.csv")
    with pytest.raises(ParameterError, match="leave it out"):
        read_clients([tmp_path / "oslo.csv"], "site")
    with pytest.raises(ParameterError, match="no column names"):
        read_clients(tmp_path / "all.npz", "site")
    with pytest.raises(ParameterError, match="no column names"):
        read_clients([tmp_path / "all.npz"], columns=["a"])
