"""What a reader of a table or a picture must know about it, in words."""

from collections.abc import Iterator

from secure_fedclust.sweep.baselines import overspending
from secure_fedclust.sweep.config import DATA, TRUTH, SweepConfig


def footnotes(config: SweepConfig, n_features: int) -> str:
    """One line for each thing to know."""
    return "\n".join(_lines(config, n_features))


def _lines(config: SweepConfig, n_features: int) -> Iterator[str]:
    private = any(epsilon is not None for epsilon in config.grid.epsilon)
    delta = f", delta {config.privacy['delta']:g}" if private else ""
    unit = config.privacy.get("unit", "record")
    what = config.data.get("benchmark") or config.data["generator"]
    protects = f" Epsilon protects each {unit}{delta}." if private else ""
    yield (
        f"{what}; means and 95% t-intervals over {len(config.seeds)} seeds of partition and "
        f"algorithm; noise is never seeded.{protects}"
    )
    if private and config.sampler == "fast":
        yield 'NO DP CLAIM: noise is from a fast generator, for experiments (sampler = "fast").'
    as_if = [name for name in ("ranges", "public_size") if config.privacy.get(name) == DATA]
    if private and as_if:
        words = {"ranges": "ranges", "public_size": "the mean number of records of a client"}
        yield (
            "NOT PRIVATE, but taken from the whole data set as if public: "
            f"{' and '.join(words[name] for name in as_if)}."
        )
    used = [value for name in config.grid.algorithm for value in config.parameters[name].values()]
    if TRUTH in [value for value in used if isinstance(value, str)]:
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
