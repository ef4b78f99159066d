import pytest
from matplotlib.colors import to_hex

from secure_fedclust.sweep import SweepConfig
from secure_fedclust.sweep.cells import cells_of
from secure_fedclust.sweep.plots import COLORS, PICTURES, draw
from secure_fedclust.sweep.runs import FIGURES
from secure_fedclust.sweep.table import summarise, tidy


def figure_of(content, name="utility", failed=()):
    """A picture of a fabricated table, in which runs of these (epsilon, seed) have failed."""
    config = SweepConfig.from_dict(content)
    cells = cells_of(config)
    outcomes = {
        cell: {
            "ari": 0.8 + 0.01 * cell.seed,
            "nmi": 0.8,
            "n_clusters": 3,
            "bytes_up": 2000.0 + cell.seed,
            "bytes_down": 10.0,
            "exchanges": 1,
            "seconds": 0.1,
            "claim": "NO DP CLAIM",
            "error": None,
        }
        for cell in cells
    }
    for cell, outcome in outcomes.items():
        if (cell.epsilon, cell.seed) in failed:
            outcome |= dict.fromkeys(FIGURES) | {"error": "E: nothing"}
    [picture] = [picture for picture in PICTURES if picture.name == name]
    summary = summarise(tidy(outcomes, cells, config, 3))
    return draw(picture, summary, config, "a note\nanother", 3)


def legend(figure):
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def shown(figure):
    return [axis for axis in figure.axes if axis.axison]


def test_lines_have_the_colour_of_their_system_and_a_band(content):
    figure = figure_of(content)
    [axis] = shown(figure)
    [line] = axis.lines
    assert to_hex(line.get_color()) == COLORS["KFed"].lower()
    assert line.get_ydata() == pytest.approx([0.805, 0.805])
    assert len(axis.collections) == 1, "a band"
    assert axis.get_xscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "8"]
    assert legend(figure) == ["KFed", "local trust"]
    assert figure.get_supxlabel() == "a note\nanother"


def test_a_single_run_has_a_hollow_marker_and_no_band(content):
    content["grid"]["epsilon"] = [1, 2, 4, 8]
    [axis] = shown(figure_of(content, failed=[(4.0, 1)]))
    line, hollow = axis.lines
    assert line.get_markevery() == [True, True, False, True]
    assert list(hollow.get_xdata()) == [4.0] and hollow.get_markerfacecolor() == "white"
    assert list(hollow.get_ydata()) == [0.8]
    band, bar = axis.collections
    [path] = band.get_paths()
    assert path.vertices[:, 0].max() == 2, "from 1 to 2, and not over 4"
    [segment] = bar.get_segments()
    assert segment[0][0] == 8 and segment[0][1] < segment[1][1], "alone, with its interval"


def test_one_seed_has_no_band_at_all(content):
    content["seeds"] = 1
    [axis] = shown(figure_of(content))
    assert len(axis.collections) == 0
    line, hollow = axis.lines
    assert line.get_markevery() == [False, False] and list(hollow.get_xdata()) == [1, 8]


def test_a_setting_of_which_all_runs_failed_leaves_a_gap(content, tmp_path):
    figure = figure_of(content, failed=[(8.0, 0), (8.0, 1)])
    [axis] = shown(figure)
    assert list(axis.lines[0].get_xdata()) == [1.0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "8"]
    everything = [(epsilon, seed) for epsilon in (1.0, 8.0) for seed in (0, 1)]
    figure = figure_of(content, failed=everything)
    [axis] = shown(figure)
    assert axis.get_xlabel() == "epsilon (log scale)"
    figure.savefig(tmp_path / "x.png")


def test_baselines_are_in_every_panel_and_in_the_legend(content):
    content["baselines"] = ["none", "central", "diffprivlib"]
    content["grid"]["clients"] = [4, 8]
    figure = figure_of(content)
    assert [axis.get_title() for axis in shown(figure)] == ["4 clients", "8 clients"]
    for axis in shown(figure):
        assert len(axis.lines) == 4
    assert legend(figure) == [
        "KFed",
        "local trust",
        "no privacy (colour of system)",
        "central k-means, no privacy",
        "diffprivlib, central (see note on epsilon)",
    ]


def test_what_the_grid_varies_has_a_panel_each(content):
    content["grid"] |= {
        "algorithm": ["FedGEM", "KFed"],
        "calibration": ["sums", "floor", "synopsis"],
        "partition": ["iid", {"name": "dirichlet", "alpha": 0.3}],
    }
    content["parameters"]["FedGEM"] = {"n_local_clusters": 3}
    panels = shown(figure_of(content))
    assert len(panels) == 6
    assert all(len(axis.lines) == 2 for axis in panels), "KFed has no calibration: it is in all"
    assert "dirichlet(alpha=0.3), calibration sums" in [axis.get_title() for axis in panels]


def test_trusts_differ_by_dashes(content):
    content["grid"] |= {"algorithm": "FKM", "protection": ["none", "masking"]}
    content["parameters"] = {"FKM": {"n_clusters": 3}}
    figure = figure_of(content)
    [axis] = shown(figure)
    assert len({str(line._dash_pattern) for line in axis.lines}) == 2
    assert legend(figure) == ["FKM", "local trust", "distributed trust (masking)"]


def test_the_true_number_of_clusters_is_drawn(content):
    [axis] = shown(figure_of(content, "n_clusters"))
    assert list(axis.lines[0].get_ydata()) == [3, 3]


@pytest.mark.parametrize("name", [picture.name for picture in PICTURES])
def test_one_epsilon_or_none_can_be_drawn(content, name, tmp_path):
    for epsilon in (1, "none"):
        content["grid"]["epsilon"] = epsilon
        figure_of(content, name).savefig(tmp_path / "x.png")


def test_nothing_sticks_out_of_the_picture_or_lies_on_the_legend(content):
    content["baselines"] = ["none", "central", "diffprivlib"]
    content["grid"] |= {
        "algorithm": ["FKM", "KFed", "FeCA", "FedGEM", "GOLD"],
        "protection": ["none", "masking", "ckks"],
    }
    content["parameters"] = {name: {"n_clusters": 3} for name in ("FKM", "KFed", "FeCA")}
    content["parameters"]["FedGEM"] = {"n_local_clusters": 3}
    figure = figure_of(content, "n_clusters")
    figure.draw_without_rendering()
    page = figure.bbox
    box = figure.legends[0].get_window_extent()
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for axis in shown(figure):
        assert not axis.get_tightbbox().overlaps(box)
