"""Which of many balls overlap, through a spatial index instead of all pairs.

Two balls of different owners overlap when their centres are at most the sum of their radii apart.
Balls of one owner are never compared: a client's own clusters are different clusters to it.

Radii may differ by orders of magnitude, and a k-d tree is searched with one radius. So balls are
kept in one tree per class of similar radii, and each class is searched as far as its largest.
"""

from collections.abc import Iterator

import numpy as np
from scipy.spatial import cKDTree

from secure_fedclust.arrays import Floats, Ints

_CLASSES = 16
_BLOCK = 1024
_FRONTIER = 32
_FEW_PAIRS = 1 << 17
_PATIENCE = 16  # building a tree costs about as much per point as coming upon it so often


def overlapping_pairs(centers: Floats, radii: Floats, owners: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All pairs ``i < j`` of overlapping balls, in blocks of index arrays.

    The cost grows with the number of pairs, which is that of balls squared if all overlap.
    """
    for members in _radius_classes(radii):
        tree = cKDTree(centers[members])
        reach = radii[members].max()
        for start in range(0, len(centers), _BLOCK):
            block = np.arange(start, min(start + _BLOCK, len(centers)))
            i, j = _within(tree, centers[block], radii[block] + reach)
            i, j = block[i], members[j]
            kept = i < j
            i, j = i[kept], j[kept]
            kept = _overlap(centers, radii, owners, i, j)
            yield i[kept], j[kept]


def overlapping_groups(centers: Floats, radii: Floats, owners: Ints) -> Ints:
    """Connected components of the overlaps: the number of the group of each ball, from 0.

    Groups are filled from a first ball outwards, and a ball that has joined a group leaves the
    index, so that a crowd of balls on one spot costs far less than its number of pairs.
    """
    groups = np.full(len(centers), -1, dtype=np.int64)
    index = _ShrinkingIndex(np.arange(len(centers)), centers, radii)
    n_groups = 0
    for first in np.argsort(-radii, kind="stable"):
        if groups[first] >= 0:
            continue
        frontier = np.array([first])
        while len(frontier):
            groups[frontier] = n_groups
            index.remove(frontier)
            around = index.around(frontier)
            frontier = _reached(frontier, around, centers, radii, owners)
        n_groups += 1
    return groups


def _reached(
    frontier: Ints, candidates: Ints, centers: Floats, radii: Floats, owners: Ints
) -> Ints:
    """Those of the candidates that overlap any ball of the frontier."""
    if len(frontier) * len(candidates) <= _FEW_PAIRS:
        i, j = np.repeat(frontier, len(candidates)), np.tile(candidates, len(frontier))
        return np.unique(j[_overlap(centers, radii, owners, i, j)])
    index = _ShrinkingIndex(candidates, centers, radii)
    reached = []
    for start in range(0, len(frontier), _FRONTIER):
        i, j = index.search(frontier[start : start + _FRONTIER])
        near = np.unique(j[_overlap(centers, radii, owners, i, j)])
        index.remove(near)
        reached.append(near)
    return np.concatenate(reached)


class _ShrinkingIndex:
    """Some of the balls, which can be searched and removed.

    A k-d tree cannot forget points, so searches come upon removed ones. When that has cost as
    much as building the tree, it is built anew without them.
    """

    def __init__(self, balls: Ints, centers: Floats, radii: Floats) -> None:
        self._centers = centers
        self._radii = radii
        self._present = np.ones(len(centers), dtype=bool)
        self._members = [balls[members] for members in _radius_classes(radii[balls])]
        self._trees = [cKDTree(centers[members]) for members in self._members]
        self._reach = [radii[members].max() for members in self._members]
        self._wasted = [0] * len(self._members)

    def remove(self, balls: Ints) -> None:
        self._present[balls] = False

    def around(self, balls: Ints) -> Ints:
        """Balls still there that may overlap any of the given ones, by one search for all."""
        middle = self._centers[balls].mean(axis=0)
        reach = (np.linalg.norm(self._centers[balls] - middle, axis=1) + self._radii[balls]).max()
        return self._search(middle[None], np.array([reach]))[1]

    def search(self, balls: Ints) -> tuple[Ints, Ints]:
        """Pairs of one of the given balls and one that is still there and may overlap it."""
        i, j = self._search(self._centers[balls], self._radii[balls])
        return balls[i], j

    def _search(self, points: Floats, radii: Floats) -> tuple[Ints, Ints]:
        found = [self._search_class(c, points, radii) for c in range(len(self._members))]
        i, j = zip(*found, strict=True)
        return np.concatenate(i), np.concatenate(j)

    def _search_class(self, c: int, points: Floats, radii: Floats) -> tuple[Ints, Ints]:
        members = self._members[c]
        if not len(members):
            return members, members
        i, j = _within(self._trees[c], points, radii + self._reach[c])
        j = members[j]
        present = self._present[j]
        self._wasted[c] += len(j) - int(present.sum())
        if self._wasted[c] > _PATIENCE * len(members):
            self._members[c] = members = members[self._present[members]]
            self._wasted[c] = 0
            if len(members):
                self._trees[c] = cKDTree(self._centers[members])
                self._reach[c] = self._radii[members].max()
        return i[present], j[present]


def _within(tree: cKDTree, points: Floats, reach: Floats) -> tuple[Ints, Ints]:
    """Pairs of a point and a member of the tree at most the point's reach apart."""
    # Pairs that just touch must not be lost to rounding; the caller decides about them.
    near = tree.query_ball_point(points, reach * (1 + 1e-12), return_sorted=False)
    i = np.repeat(np.arange(len(points)), [len(found) for found in near])
    return i, np.concatenate([*near, []]).astype(np.int64)


def _radius_classes(radii: Floats) -> list[Ints]:
    """Ball indices by class; radii of a class differ by less than a factor of two.

    All radii smaller than the largest by 2 to the power of `_CLASSES` share the last class.
    """
    largest = radii.max()
    with np.errstate(divide="ignore"):
        halvings = np.floor(np.log2(largest) - np.log2(radii)) if largest > 0 else 0 * radii
    classes = np.minimum(halvings, _CLASSES)
    return [np.flatnonzero(classes == c) for c in np.unique(classes)]


def _overlap(
    centers: Floats, radii: Floats, owners: Ints, i: Ints, j: Ints
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    distances = np.linalg.norm(centers[i] - centers[j], axis=1)
    return np.asarray((distances <= radii[i] + radii[j]) & (owners[i] != owners[j]))
