"""What a reader of a table or a picture must know about it, in words."""

from collections.abc import Iterator, Sequence

from secure_fedclust.sweep.baselines import overspending
from secure_fedclust.sweep.config import DATA, SweepConfig
from secure_fedclust.sweep.runs import NO_CLAIM
from secure_fedclust.sweep.table import Row


def footnotes(config: SweepConfig, n_features: int, summary: Sequence[Row]) -> str:
    """One line for each thing to know."""
    return "\n".join(_lines(config, n_features, summary))


def without_claim(config: SweepConfig) -> Iterator[str]:
    """Why private runs of a sweep have no claim, a line for each reason."""
    if not _is_private(config):
        return
    if config.sampler == "fast":
        yield f'{NO_CLAIM}: noise is from a fast generator, for experiments (sampler = "fast").'
    as_if = [name for name in ("ranges", "public_size") if config.privacy.get(name) == DATA]
    if as_if:
        words = {"ranges": "ranges", "public_size": "the mean number of records of a client"}
        yield (
            f"{NO_CLAIM}: NOT PRIVATE, but taken from the whole data set as if public: "
            f"{' and '.join(words[name] for name in as_if)}."
        )
    if knowing := _told_the_truth(config):
        yield (
            f"{NO_CLAIM} for {', '.join(knowing)}: NOT PRIVATE, but taken from the true labels as "
            "if known: the numbers of clusters that they are told."
        )


def _lines(config: SweepConfig, n_features: int, summary: Sequence[Row]) -> Iterator[str]:
    private = _is_private(config)
    delta = f", delta {config.privacy['delta']:g}" if private else ""
    unit = config.privacy.get("unit", "record")
    protects = f" Epsilon protects each {unit}{delta}." if private else ""
    # Every setting has an ARI, or none of its runs came to an end.
    settings = [row for row in summary if row["figure"] == "ari"]
    numbers = [row["n"] for row in settings]
    fewest, most = min(numbers), max(numbers)
    over = f"{most} seed{'s' * (most != 1)}" if fewest == most else f"{fewest} to {most} seeds"
    yield (
        f"{_described(config)}; means and 95% t-intervals over {over} of partition and algorithm; "
        f"noise is never seeded.{protects}"
    )
    if failed := sum(row["failed"] for row in settings):
        gone = " Settings without any are not drawn." if fewest == 0 else ""
        yield (
            f"{failed} of {failed + sum(numbers)} runs FAILED and are in no mean; the smallest "
            f"number of runs behind a mean is {min(n for n in numbers if n) if most else 0} of "
            f"{len(config.seeds)}.{gone}"
        )
    if any(row["n"] == 1 and row["trust"] != "none" for row in settings):
        yield "Hollow markers are single runs, which have no interval."
    yield from without_claim(config)
    if not private and _told_the_truth(config):
        yield "Numbers of clusters are the true ones, as if they were known."
    if "diffprivlib" in config.baselines:
        factor = overspending(n_features)
        verb = "more" if factor > 1 else "less"
        yield (
            f"diffprivlib's k-means has all records in one place. With {n_features} features it "
            f"spends {factor:.2f} times the epsilon at which it is drawn, {verb} than it says, as "
            "it swaps the parts of its budget; it adds no noise for empty clusters, and shows its "
            "exact inertia."
        )


def _described(config: SweepConfig) -> str:
    """The data, and how they are divided where that is the same in all runs."""
    given = dict(config.data)
    name = given.pop("benchmark", None) or given.pop("generator")
    arguments = ", ".join(f"{key} {value}" for key, value in given.items())
    words = f"{name} ({arguments})" if arguments else str(name)
    grid = config.grid
    if len(grid.clients) == 1:
        words += f", {grid.clients[0]} clients"
    return words + (f", {next(iter(grid.partition))}" if len(grid.partition) == 1 else "")


def _is_private(config: SweepConfig) -> bool:
    return any(epsilon is not None for epsilon in config.grid.epsilon)


def _told_the_truth(config: SweepConfig) -> list[str]:
    """Systems that are."""
    parameters = config.parameters
    return [
        name
        for name in config.grid.algorithm
        if any(key in parameters[name] for key in config.taken_from_data(name))
    ]
