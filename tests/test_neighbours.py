"""Neighbours from coordinates, against a plain loop that sorts by (distance, index)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnpool_gen import InvalidArgumentError, UnsupportedTypeError, knn_table, neighbours

Point = tuple[float, ...]

DISTANCES: dict[str, Callable[[Point, Point], float]] = {
    "euclidean": lambda a, b: sum((u - v) * (u - v) for u, v in zip(a, b, strict=True)),
    "manhattan": lambda a, b: sum(abs(u - v) for u, v in zip(a, b, strict=True)),
    "chebyshev": lambda a, b: max(abs(u - v) for u, v in zip(a, b, strict=True)),
}


def sorted_by_hand(points_in: list[Point], points_out: list[Point], k: int, metric: str) -> list[list[int]]:
    """The table, column by column."""
    columns = []
    for out in points_out:
        nearest = sorted(range(len(points_in)), key=lambda m: (DISTANCES[metric](points_in[m], out), m))[:k]
        columns.append(nearest + [len(points_in)] * (k - len(nearest)))
    return [[column[slot] for column in columns] for slot in range(k)]


def test_points_of_every_scale() -> None:
    """Clusters within clusters, far from the origin, on a line: where a tree could lose neighbours by rounding."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        dimensions = int(generator.integers(1, 11))
        scales = 10.0 ** generator.integers(-12, 12, size=(80, 1))
        points = generator.normal(size=(80, dimensions)) * scales + generator.choice([0.0, 1.0, 1e8])
        points[:, 1:] *= generator.choice([0.0, 1.0])
        outputs = np.concatenate([points[::7], points[::11] + 1e-13, generator.normal(size=(5, dimensions))])
        k = int(generator.integers(1, 20))
        for metric in DISTANCES:
            expected = sorted_by_hand(as_points(points), as_points(outputs), k, metric)
            assert knn_table(points, outputs, k, metric).tolist() == expected


def as_points(array: np.ndarray) -> list[Point]:
    return [tuple(row) for row in array.tolist()]


def grids(dimensions: int) -> st.SearchStrategy[list[Point]]:
    coordinate = st.integers(-3, 3).map(float)
    return st.lists(st.tuples(*[coordinate] * dimensions), max_size=60)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), metric=st.sampled_from(sorted(DISTANCES)), dimensions=st.integers(1, 4), k=st.integers(0, 12))
def test_ties_go_to_the_lower_index(data: st.DataObject, metric: str, dimensions: int, k: int) -> None:
    points_in, points_out = data.draw(grids(dimensions)), data.draw(grids(dimensions))
    arrays = [np.array(points, dtype=float).reshape(-1, dimensions) for points in (points_in, points_out)]

    table = knn_table(*arrays, k, metric)

    assert table.dtype == torch.int64
    assert table.shape == (k, len(points_out))
    assert table.tolist() == sorted_by_hand(points_in, points_out, k, metric)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), k=st.integers(1, 8))
def test_angles(data: st.DataObject, k: int) -> None:
    """Whole directions have exact cosines, as fractions; opposite, parallel and equally distant ones are all there."""
    directions = st.tuples(*[st.integers(-2, 2)] * 3).filter(any)
    points_in = data.draw(st.lists(directions, min_size=1, max_size=40))
    points_out = data.draw(st.lists(directions, min_size=1, max_size=10))

    table = knn_table(np.array(points_in), np.array(points_out), k, "cosine")

    for n, out in enumerate(points_out):
        cosines = [np.dot(a, out) / math.sqrt(np.dot(a, a) * np.dot(out, out)) for a in points_in]
        column = table[:, n].tolist()
        found = min(k, len(points_in))
        assert sorted(set(column[:found])) == sorted(column[:found])
        assert column[found:] == [len(points_in)] * (k - found)
        # Directions that are equal as fractions may differ by rounding: the order is that of the angles up to it.
        assert [cosines[m] for m in column[:found]] == pytest.approx(sorted(cosines, reverse=True)[:found], abs=1e-12)


def test_angles_on_the_axes() -> None:
    axes = torch.cat([torch.eye(3), -torch.eye(3)])
    table = knn_table(axes, torch.tensor([[0.0, 5.0, 0.0], [-0.1, 0.0, 0.0]]), 6, "cosine")
    assert table.T.tolist() == [[1, 0, 2, 3, 5, 4], [3, 1, 2, 4, 5, 0]]


@pytest.mark.parametrize("metric", [*DISTANCES, "cosine"])
def test_many_points_against_all_distances(metric: str) -> None:
    generator = np.random.default_rng(5)
    points_in, points_out = generator.normal(size=(3000, 3)), generator.normal(size=(700, 3))
    table = knn_table(points_in, points_out, 9, metric)
    if metric == "cosine":
        points_in, points_out = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (points_in, points_out))
    order = {"manhattan": 1, "chebyshev": np.inf}.get(metric, 2)
    for n in range(700):
        distances = np.linalg.norm(points_in - points_out[n], ord=order, axis=1)
        assert table[:, n].tolist() == np.argsort(distances, kind="stable")[:9].tolist()


def test_points_that_all_coincide() -> None:
    table = knn_table(np.ones((500, 2)), np.zeros((3 * neighbours.CHUNK, 2)), 4)
    assert (table == torch.arange(4)[:, None]).all()


@pytest.mark.parametrize(("nin", "nout", "k"), [(0, 3, 2), (3, 0, 2), (0, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_nothing_to_find(nin: int, nout: int, k: int) -> None:
    table = knn_table(np.zeros((nin, 2)), np.zeros((nout, 2)), k)
    assert table.shape == (k, nout)
    assert nin > 0 or (table == 0).all()  # pads, which are Nin


@pytest.mark.parametrize(
    "made",
    [
        torch.tensor,
        lambda points: torch.tensor(points, dtype=torch.float32, requires_grad=True),
        lambda points: torch.tensor(points, dtype=torch.bfloat16),
        lambda points: torch.tensor(points, dtype=torch.int16),
        lambda points: np.array(points, dtype=np.uint8),
        lambda points: np.array(points, dtype=np.float16, order="F"),
        lambda points: np.array([points, points], dtype=float)[1, ::-1][::-1],
        lambda points: points,
        tuple,
    ],
)
def test_points_of_any_kind(made: Callable[[list[list[int]]], Any]) -> None:
    table = knn_table(made([[0, 0], [4, 0], [0, 4]]), made([[3, 0], [0, 3]]), 2)
    assert table.tolist() == [[1, 2], [0, 0]]


def test_near_is_decided_in_float64() -> None:
    """In float32 both inputs are at distance 1."""
    assert knn_table([[1 + 1e-12], [1.0]], [[0.0]], 2).tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("points_in", "points_out", "k", "metric", "kind", "message"),
    [
        ([[0.0], [math.nan]], [[0.0]], 1, "euclidean", InvalidArgumentError, r"points_in\[1, 0\] = nan"),
        ([[0.0]], [[0.0], [math.inf]], 1, "euclidean", InvalidArgumentError, r"points_out\[1, 0\] = inf"),
        ([[-1e200]], [[0.0]], 1, "manhattan", InvalidArgumentError, r"points_in\[0, 0\] = -1e\+200.*below 1e\+150"),
        ([0.0], [[0.0]], 1, "euclidean", InvalidArgumentError, r"points_in must have shape \[N, D\].*not \[1\]"),
        (np.ones((2, 0)), np.ones((2, 0)), 1, "euclidean", InvalidArgumentError, r"at least one.*not \[2, 0\]"),
        ([[0.0]], [[0.0, 1.0]], 1, "euclidean", InvalidArgumentError, "points_in have 1 coordinates, points_out 2"),
        ([[0.0]], [[0.0]], -1, "euclidean", InvalidArgumentError, "k = -1"),
        ([[0.0]], [[0.0]], True, "euclidean", InvalidArgumentError, "k = True"),
        ([[0.0]], [[0.0]], 1.5, "euclidean", UnsupportedTypeError, "k must be an integer, not 1.5"),
        (
            [[0.0]],
            [[0.0]],
            1,
            "hamming",
            InvalidArgumentError,
            "metric = 'hamming'; there are 'euclidean', 'manhattan'",
        ),
        ([[1.0], [0.0]], [[1.0]], 1, "cosine", InvalidArgumentError, r"points_in\[1\] has no length"),
        ([["a"]], [[0.0]], 1, "euclidean", UnsupportedTypeError, "points_in must be real numbers"),
        ([[1j]], [[0.0]], 1, "euclidean", UnsupportedTypeError, "points_in must be real numbers, not complex128"),
        (torch.ones(1, 1).bool(), [[0.0]], 1, "euclidean", UnsupportedTypeError, "real numbers, not bool"),
        (None, [[0.0]], 1, "euclidean", UnsupportedTypeError, "points_in must be real numbers, not object"),
        ([[0.0], [0.0, 1.0]], [[0.0]], 1, "euclidean", InvalidArgumentError, r"points_in must have shape \[N, D\]: "),
        (
            [[0.0]],
            torch.ones(1, 1, device="meta"),
            1,
            "euclidean",
            InvalidArgumentError,
            "points_out is a meta tensor: who is near depends on its values",
        ),
        (
            torch.ones(1, 1).to_sparse(),
            [[0.0]],
            1,
            "euclidean",
            UnsupportedTypeError,
            "points_in must be a strided tensor, not one of layout torch.sparse_coo",
        ),
    ],
)
def test_what_is_refused(
    points_in: Any, points_out: Any, k: Any, metric: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        knn_table(points_in, points_out, k, metric)


def test_without_scipy() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "import knnpool_gen\n"
        "try: knnpool_gen.knn_table([[0.0]], [[0.0]], 1)\n"
        "except knnpool_gen.MissingDependencyError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "the search for neighbours needs SciPy: pip install 'knnpool-gen[points]'"
