"""From coordinates to neighbour tables."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum
from types import ModuleType
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, MissingDependencyError, UnsupportedTypeError
from knnpool_gen.runtime.plan import check_dense, check_has_values

Points: TypeAlias = Tensor | NDArray[Any] | Sequence[Sequence[float]]
_Array: TypeAlias = NDArray[np.float64]

LARGEST = 1e150
"""Coordinates are smaller than this, so that squares of distances are finite."""
CHUNK = 64
"""Output points searched at once: where many input points coincide, each has as many candidates."""
SLACK = 1e-9
"""How much farther than the k-th neighbour is looked, relatively: far more than distances are off by rounding."""


class Metric(str, Enum):
    """What near means."""

    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"
    CHEBYSHEV = "chebyshev"
    COSINE = "cosine"
    """By the angle between two vectors, whatever their lengths: the great-circle distance."""


_ORDERS = {Metric.EUCLIDEAN: 2.0, Metric.MANHATTAN: 1.0, Metric.CHEBYSHEV: np.inf, Metric.COSINE: 2.0}
"""The Minkowski norm that sorts neighbours; between unit vectors the chord grows with the angle."""


def knn_table(points_in: Points, points_out: Points, k: SupportsIndex, metric: str = "euclidean") -> Tensor:
    """The ``k`` input points nearest to each output point.

    The search is exact, and distances are compared in float64. Nearer points come first, of equally near ones that
    with the lower index; the table is the same on every run and machine.

    Args:
        points_in: ``[Nin, D]``, a tensor or what NumPy takes for an array, real and finite.
        points_out: ``[Nout, D]``.
        k: neighbours of each output. It may be larger than Nin: the slots from Nin on are pads then.
        metric: ``"euclidean"``, ``"manhattan"``, ``"chebyshev"`` or ``"cosine"``, which is by angle: the great-circle
            distance of points on a sphere around the origin.

    Returns:
        ``indices`` ``[K, Nout]``, int64; pads are ``Nin``. On the device of ``points_in`` if that is a tensor.

    Raises:
        InvalidArgumentError: a shape, coordinate, ``k`` or metric that cannot be; names it.
        UnsupportedTypeError: coordinates are not real numbers, or ``k`` is no integer.
        MissingDependencyError: SciPy is not installed.
    """
    known = next((known for known in Metric if metric == known.value), None)
    if known is None:
        raise InvalidArgumentError(f"metric = {metric!r}; there are {', '.join(repr(known.value) for known in Metric)}")
    k = _checked_k(k)
    inputs = _coordinates("points_in", points_in, known)
    outputs = _coordinates("points_out", points_out, known)
    if inputs.shape[1] != outputs.shape[1]:
        raise InvalidArgumentError(
            f"points_in have {inputs.shape[1]} coordinates, points_out {outputs.shape[1]}: they lie in different spaces"
        )
    nin, nout = len(inputs), len(outputs)
    table = np.full((nout, k), nin, dtype=np.int64)
    found = min(k, nin)
    if found and nout:
        tree = _spatial().cKDTree(inputs)
        for first in range(0, nout, CHUNK):
            chunk = slice(first, first + CHUNK)
            table[chunk, :found] = _nearest(tree, outputs[chunk], found, _ORDERS[known])
    indices = torch.from_numpy(np.ascontiguousarray(table.T))
    return indices.to(points_in.device) if isinstance(points_in, Tensor) else indices


def _nearest(tree: Any, outputs: _Array, k: int, order: float) -> NDArray[np.int64]:
    """Indices ``[len(outputs), k]`` in the tree, by distance and then by index.

    The tree says how far the k-th neighbour is, but of several at that distance it picks any. So all within that
    distance are candidates, and are sorted here.
    """
    radius, _ = tree.query(outputs, [k], p=order)
    candidates = tree.query_ball_point(outputs, radius[:, 0] * (1 + SLACK), p=order)
    sizes = np.array([len(some) for some in candidates])
    nodes = np.concatenate(candidates).astype(np.int64)
    columns = np.repeat(np.arange(len(outputs)), sizes)
    distances = _distances(tree.data[nodes] - outputs[columns], order)
    by_distance = np.lexsort((nodes, distances, columns))
    starts = np.cumsum(sizes) - sizes
    nearest: NDArray[np.int64] = nodes[by_distance][starts[:, None] + np.arange(k)]
    return nearest


def _distances(differences: _Array, order: float) -> _Array:
    """What is compared: the norm, of order 2 its square, which has no rounding of a root."""
    if order == np.inf:
        largest: _Array = np.abs(differences).max(axis=1)
        return largest
    return _sums(differences**2 if order == 2 else np.abs(differences))


def _sums(terms: _Array) -> _Array:
    """The sum of each row, from left to right: ``sum`` may add in another order on another machine."""
    result: _Array = np.cumsum(terms, axis=1)[:, -1]
    return result


def _coordinates(name: str, points: Points, metric: Metric) -> _Array:
    """``points`` in float64, checked; for ``Metric.COSINE`` scaled to unit length."""
    if isinstance(points, Tensor):
        check_dense(name, points)
        check_has_values(name, points, "who is near")
        points = points.detach().cpu()
        array: NDArray[Any] = (points.double() if points.is_floating_point() else points).numpy()
    else:
        try:
            array = np.asarray(points)
        except ValueError as error:
            raise InvalidArgumentError(f"{name} must have shape [N, D]: {error}") from error
    if array.dtype.kind not in "fiu":
        raise UnsupportedTypeError(f"{name} must be real numbers, not {array.dtype}")
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidArgumentError(
            f"{name} must have shape [N, D] with at least one coordinate, not {list(array.shape)}"
        )
    coordinates = array.astype(np.float64)
    wrong = ~(np.abs(coordinates) < LARGEST)
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        value = coordinates[row, column]
        raise InvalidArgumentError(f"{name}[{row}, {column}] = {value}: coordinates must be numbers below {LARGEST:g}")
    if metric is Metric.COSINE:
        length = np.sqrt(_sums(coordinates**2))[:, None]
        if not length.all():
            raise InvalidArgumentError(f"{name}[{int(length.argmin())}] has no length, so no angle to others")
        coordinates = coordinates / length
    return coordinates


def _checked_k(k: SupportsIndex) -> int:
    try:
        value = operator.index(k)
    except TypeError:
        raise UnsupportedTypeError(f"k must be an integer, not {k!r}") from None
    if isinstance(k, bool) or value < 0:
        raise InvalidArgumentError(f"k = {k}; it must be an integer that is not negative")
    return value


def _spatial() -> ModuleType:
    try:
        import scipy.spatial
    except ImportError as error:
        raise MissingDependencyError(
            "the search for neighbours needs SciPy: pip install 'knnpool-gen[points]'"
        ) from error
    spatial: ModuleType = scipy.spatial
    return spatial
