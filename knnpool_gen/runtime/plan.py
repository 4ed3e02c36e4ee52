"""From a neighbour table to a plan: :class:`PoolMeta`, and where plans are kept.

A plan belongs to one table in one state on one device. :class:`PlanCache` keeps plans for tables that people
pass around, :func:`ensure_pool_metadata` keeps one on a layer; both recognise a table by a :class:`_Stamp`.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError

DeviceLike: TypeAlias = torch.device | str | int

NO_SLOT = 255
"""What ``aux`` and ``first_slot`` hold where there is no slot."""

MAX_K = NO_SLOT
"""Slots must fit in a byte beside :data:`NO_SLOT`."""
MAX_NOUT = 2**24 - 1
"""A packed entry has 24 bits for the output node."""
MAX_INT32 = 2**31 - 1

_INTEGER_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64}
)


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Tensors made inside may outlive the caller's inference mode and functorch transform, as plans do."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


@dataclass(frozen=True, eq=False)
class PoolMeta:
    """Everything derived from a neighbour table, on one device. A plan is equal to itself only.

    Pickling, copying and ``torch.load(map_location=...)`` keep ``device`` true to where the tensors are.
    """

    nin: int
    nout: int
    k: int
    indices: Tensor = field(repr=False)
    """int32 ``[K, Nout]``, contiguous; every pad is exactly ``nin``."""
    indices_i64: Tensor = field(repr=False)
    """The same in int64."""
    count: Tensor = field(repr=False)
    """float32 ``[Nout]``: number of non-pad slots."""
    inv_count: Tensor = field(repr=False)
    """float32 ``[Nout]``: ``1 / count``, inf for an empty column."""
    rev_rowptr: Tensor = field(repr=False)
    """int32 ``[nin + 1]``: entries of input node m are ``rev_kn[rev_rowptr[m]:rev_rowptr[m + 1]]``."""
    rev_kn: Tensor = field(repr=False)
    """int32 ``[entries]``: ``(k << 24) | n``, to be read as uint32, by (input node, ``k * Nout + n``)."""
    device: torch.device
    first_slot: Tensor = field(init=False, repr=False)
    """uint8 ``[Nout]``: the first non-pad slot, 255 for an empty column."""

    @_ordinary_tensors()
    def __post_init__(self) -> None:
        """Derive ``first_slot``, which the constructor of the seed does not know."""
        slots = torch.arange(self.k, dtype=torch.uint8, device=self.device)[:, None]
        candidates = torch.where(self.indices < self.nin, slots, NO_SLOT)
        none = candidates.new_full((1, self.nout), NO_SLOT)  # also makes the minimum exist where K = 0
        object.__setattr__(self, "first_slot", torch.cat([candidates, none]).amin(0))

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take over copied or loaded tensors, wherever they have come to lie."""
        self.__dict__.update(state)
        self.__dict__["device"] = self.indices.device

    @_ordinary_tensors()
    def to(self, device: DeviceLike) -> PoolMeta:
        """This plan on ``device``: itself if it is there already, otherwise a copy."""
        if resolve_device(device) == self.device:
            return self
        moved = object.__new__(PoolMeta)
        moved.__setstate__({name: _moved(value, device) for name, value in vars(self).items()})
        return _finished(moved)


def _moved(value: object, device: DeviceLike) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


def _finished(plan: PoolMeta) -> PoolMeta:
    """Wait until the tensors are written: a plan is used from other streams than the one that built it."""
    if plan.device.type == "cuda":
        torch.cuda.current_stream(plan.device).synchronize()
    return plan


@_ordinary_tensors()
def pool_meta_from_indices(indices: Tensor, nin: SupportsIndex, device: DeviceLike | None = None) -> PoolMeta:
    """Build the plan of a neighbour table.

    Args:
        indices: ``[K, Nout]``, any integer dtype, strides and device; entries ``>= nin`` are padding, however
            large. It is copied, never kept.
        nin: number of input nodes.
        device: where the plan is to lie; by default where ``indices`` lies.

    Raises:
        UnsupportedTypeError: ``indices`` is no integer tensor, or ``nin`` no integer.
        InvalidArgumentError: wrong rank, a negative entry or ``nin``, or a size that is not supported.
    """
    _check_table(indices)
    nin = _checked_nin(nin)
    k, nout = indices.shape
    for name, size, limit in (
        ("K", k, MAX_K),
        ("Nout", nout, MAX_NOUT),
        ("K * Nout", k * nout, MAX_INT32),
        ("Nin", nin, MAX_INT32),
    ):
        if size > limit:
            raise InvalidArgumentError(f"{name} = {size} is not supported yet, at most {limit}")
    device = indices.device if device is None else resolve_device(device)

    table = indices.to(device, torch.int64)
    if indices.dtype is torch.uint64:
        table = torch.where(table < 0, nin, table)  # 2**63 and more have wrapped around: padding
    else:
        _check_not_negative(table, nin)
    table = table.clamp(max=nin).contiguous()  # always a copy, never the caller's own memory

    real = table < nin
    count = real.sum(0).to(torch.float32)
    slots = torch.arange(k, device=device)[:, None]
    packed = slots << 24 | torch.arange(nout, device=device)
    nodes = table[real]  # both in order of k * Nout + n, which the stable sort keeps within a node
    entries = packed[real][nodes.argsort(stable=True)]
    ends = nodes.bincount(minlength=nin).cumsum(0)
    plan = PoolMeta(
        nin=nin,
        nout=nout,
        k=k,
        indices=table.to(torch.int32),
        indices_i64=table,
        count=count,
        inv_count=count.reciprocal(),
        rev_rowptr=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        rev_kn=entries.to(torch.int32),
        device=device,
    )
    return _finished(plan)


class PlanCache:
    """Plans of the tables used last, found by the identity of the table. Safe to use from several threads.

    A plan is dropped when its table dies, is rebuilt when the table was changed in place or given other data,
    and keeps no table alive. At most ``limit`` plans are kept, the least recently used one goes first.
    """

    def __init__(self, limit: int = 64) -> None:
        """Start empty; ``limit`` is at least 1."""
        if limit < 1:
            raise InvalidArgumentError(f"limit = {limit}: a cache holds at least 1 plan")
        self._limit = limit
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[int, int, torch.device], tuple[_Stamp, PoolMeta]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of plans kept."""
        return len(self._plans)

    def get(self, indices: Tensor, nin: SupportsIndex, device: DeviceLike | None = None) -> PoolMeta:
        """Return the plan of ``indices`` as it is now; arguments as for :func:`pool_meta_from_indices`."""
        _check_table(indices)
        nin = _checked_nin(nin)
        device = indices.device if device is None else resolve_device(device)
        key = (id(indices), nin, device)
        plans = self._plans
        with self._lock:
            stamp, plan = plans.pop(key, (None, None))
            if stamp is None or plan is None or not stamp.matches(indices):
                # A dying table takes its plan along. No lock there, since the collector may run it while this
                # thread holds the lock; one pop is atomic, and no id is given out again before it has run.
                stamp = _Stamp(indices, lambda _: plans.pop(key, None))
                plan = pool_meta_from_indices(indices, nin, device)
            plans[key] = (stamp, plan)
            while len(plans) > self._limit:
                plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()


_plans = PlanCache()


def plan_for(indices: Tensor, nin: SupportsIndex, device: DeviceLike | None = None) -> PoolMeta:
    """Like :func:`pool_meta_from_indices`, from the cache that the whole process shares."""
    return _plans.get(indices, nin, device)


def clear_plans() -> None:
    """Empty the cache behind :func:`plan_for`. Plans on layers stay."""
    _plans.clear()


_LAYER_PLAN = "_knn_pool_cuda_meta"
_LAYER_STAMP = "_knn_pool_cuda_stamp"


def ensure_pool_metadata(layer: object, device: DeviceLike | None = None) -> PoolMeta:
    """Return the plan of a layer like fovi's ``KNNPoolingLayer``, kept on ``layer._knn_pool_cuda_meta``.

    Reads ``layer.knn_indices_pad_token``, the ``[K, Nout]`` table, and ``layer.knn_pad_token_val``, which is
    Nin (without it, ``layer.in_coords.shape[0]``). The plan is built again for another device and when the
    table is another one or was changed; a copied or loaded layer builds its own. It never enters the
    ``state_dict``.

    Raises:
        UnsupportedTypeError: the layer lacks one of these attributes.
        InvalidArgumentError: as :func:`pool_meta_from_indices`.
    """
    indices, nin = _table_of(layer)
    device = indices.device if device is None else resolve_device(device)

    # The stamp is read before the plan and written after it, so that it never vouches for an older plan.
    stamp = getattr(layer, _LAYER_STAMP, None)
    plan = getattr(layer, _LAYER_PLAN, None)
    if (
        isinstance(stamp, _Stamp)
        and isinstance(plan, PoolMeta)
        and (plan.nin, plan.device) == (nin, device)
        and stamp.matches(indices)
    ):
        return plan
    stamp = _Stamp(indices)
    plan = pool_meta_from_indices(indices, nin, device)
    # Past nn.Module.__setattr__: nothing is to be registered.
    object.__setattr__(layer, _LAYER_PLAN, plan)
    object.__setattr__(layer, _LAYER_STAMP, stamp)
    return plan


def resolve_device(device: DeviceLike) -> torch.device:
    """Return what a tensor made on ``device`` says of itself: ``cuda:<current>`` for ``cuda``."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=device).device if device.index is None else device


class _Stamp:
    """Recognises a table in the state it has now, without keeping the table alive."""

    def __init__(self, table: Tensor, on_death: Callable[[object], object] | None = None) -> None:
        """Take the stamp of ``table``; ``on_death`` is called when the table dies before the stamp does."""
        self._table = weakref.ref(table, on_death)
        self._facts = _facts(table)
        # While it is held, its address cannot come back as that of other data.
        self._storage = table.untyped_storage()
        # Inference tensors do not count their changes: only the contents can tell.
        self._contents = table.to(torch.int64, copy=True) if table.is_inference() else None

    def matches(self, table: Tensor) -> bool:
        """Whether ``table`` is the same object, unchanged as far as torch records changes."""
        return (
            self._table() is table
            and self._facts == _facts(table)
            and (self._contents is None or torch.equal(table.to(torch.int64), self._contents))
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: what is copied or loaded with it has another table."""
        return type(None), ()


def _facts(table: Tensor) -> tuple[object, ...]:
    version = None if table.is_inference() else table._version
    return version, table.data_ptr(), table.shape, table.stride(), table.dtype, table.device


def _table_of(layer: object) -> tuple[Tensor, int]:
    """The table and Nin of a layer like fovi's ``KNNPoolingLayer``, checked."""
    kind = type(layer).__name__
    indices = getattr(layer, "knn_indices_pad_token", None)
    if indices is None:
        raise UnsupportedTypeError(f"{kind} has no knn_indices_pad_token, the table of a pooling layer")
    _check_table(indices)
    nin = getattr(layer, "knn_pad_token_val", None)
    if nin is None:
        coordinates = getattr(layer, "in_coords", None)
        if coordinates is None:
            raise UnsupportedTypeError(f"{kind} has neither knn_pad_token_val nor in_coords to say what Nin is")
        nin = coordinates.shape[0]
    return indices, _checked_nin(nin)


def _check_table(indices: object) -> None:
    """Check what a look at a table tells; its values are checked when a plan is built."""
    if not isinstance(indices, Tensor):
        raise UnsupportedTypeError(f"indices must be an integer tensor, not {type(indices).__name__}")
    if indices.dtype not in _INTEGER_DTYPES:
        raise UnsupportedTypeError(f"indices must be an integer tensor, not {indices.dtype}")
    if indices.dim() != 2:
        raise InvalidArgumentError(f"indices must have shape [K, Nout], not {list(indices.shape)}")


def _checked_nin(nin: SupportsIndex) -> int:
    if isinstance(nin, bool):
        raise UnsupportedTypeError(f"Nin must be an integer, not {nin}")
    try:
        value = operator.index(nin)
    except TypeError:
        raise UnsupportedTypeError(f"Nin must be an integer, not {nin!r}") from None
    if value < 0:
        raise InvalidArgumentError(f"Nin = {value} is negative")
    return value


def _check_not_negative(table: Tensor, nin: int) -> None:
    negative = table < 0
    if negative.any():
        k, n = negative.nonzero()[0].tolist()
        raise InvalidArgumentError(
            f"indices[{k}, {n}] = {int(table[k, n])} is negative; padding is any entry >= Nin = {nin}"
        )
