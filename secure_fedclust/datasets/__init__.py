"""Data for experiments: partitions and generators of the papers, benchmark sets, users' files."""

from secure_fedclust.datasets.generators import fkm_grid, rmin_blobs, stochastic_balls
from secure_fedclust.datasets.loaders import (
    Benchmark,
    benchmark_names,
    clients_from_frame,
    load_benchmark,
    read_client,
    read_clients,
)
from secure_fedclust.datasets.non_icd import non_icd_degree, non_icd_partition
from secure_fedclust.datasets.partition import (
    cluster_subset_partition,
    dirichlet_partition,
    distance_partition,
    iid_partition,
)

__all__ = [
    "Benchmark",
    "benchmark_names",
    "clients_from_frame",
    "cluster_subset_partition",
    "dirichlet_partition",
    "distance_partition",
    "fkm_grid",
    "iid_partition",
    "load_benchmark",
    "non_icd_degree",
    "non_icd_partition",
    "read_client",
    "read_clients",
    "rmin_blobs",
    "stochastic_balls",
]
