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


def overlapping_pairs(centers: Floats, radii: Floats, owners: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All pairs ``i < j`` of overlapping balls, in blocks of index arrays.

    The cost grows with the number of pairs, which is that of balls squared if all overlap.
    """
    for members in _radius_classes(radii):
        tree = cKDTree(centers[members])
        reach = radii[members].max()
        for start in range(0, len(centers), _BLOCK):
            block = np.arange(start, min(start + _BLOCK, len(centers)))
            near = tree.query_ball_point(centers[block], radii[block] + reach, return_sorted=False)
            i = np.repeat(block, [len(found) for found in near])
            j = members[np.concatenate([*near, []]).astype(np.int64)]
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
    index = _ShrinkingIndex(centers, radii)
    n_groups = 0
    for first in np.argsort(-radii, kind="stable"):
        if groups[first] >= 0:
            continue
        groups[first] = n_groups
        index.remove(np.array([first]))
        frontier = [first]
        while frontier:
            ball = frontier.pop()
            near = index.search(ball)
            near = near[_overlap(centers, radii, owners, ball, near)]
            groups[near] = n_groups
            index.remove(near)
            frontier.extend(near)
        n_groups += 1
    return groups


class _ShrinkingIndex:
    """Balls that can be searched and removed.

    A k-d tree cannot forget points, so searches come upon removed ones. When they have come
    upon as many as a tree holds, the tree is built anew without them.
    """

    def __init__(self, centers: Floats, radii: Floats) -> None:
        self._centers = centers
        self._radii = radii
        self._present = np.ones(len(centers), dtype=bool)
        self._members = _radius_classes(radii)
        self._trees = [cKDTree(centers[members]) for members in self._members]
        self._reach = [radii[members].max() for members in self._members]
        self._wasted = [0] * len(self._members)

    def remove(self, balls: Ints) -> None:
        self._present[balls] = False

    def search(self, ball: int) -> Ints:
        """Balls still there that may overlap the given one."""
        found = [self._search_class(c, ball) for c in range(len(self._members))]
        return np.concatenate(found)

    def _search_class(self, c: int, ball: int) -> Ints:
        if not len(self._members[c]):
            return self._members[c]
        near = self._trees[c].query_ball_point(
            self._centers[ball], self._radii[ball] + self._reach[c], return_sorted=False
        )
        hits = self._members[c][np.asarray(near, dtype=np.int64)]
        present = hits[self._present[hits]]
        self._wasted[c] += len(hits) - len(present)
        if self._wasted[c] > len(self._members[c]):
            self._members[c] = self._members[c][self._present[self._members[c]]]
            self._wasted[c] = 0
            if len(self._members[c]):
                self._trees[c] = cKDTree(self._centers[self._members[c]])
                self._reach[c] = self._radii[self._members[c]].max()
        return present


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
    centers: Floats, radii: Floats, owners: Ints, i: Ints | int, j: Ints
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    distances = np.linalg.norm(centers[i] - centers[j], axis=1)
    return np.asarray((distances <= radii[i] + radii[j]) & (owners[i] != owners[j]))
