"""From a neighbour table to a plan: :class:`PoolMeta`, and where plans are kept.

A plan belongs to one table in one state on one device. :class:`PlanCache` keeps plans for tables that people
pass around, :func:`ensure_pool_metadata` keeps one on a layer; both recognise a table by a :class:`TableStamp`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.kernel import CHUNK, DEPTH
from knnpool_gen.runtime import capture
from knnpool_gen.runtime.table_cache import TableCache, TableStamp

DeviceLike: TypeAlias = torch.device | str | int

NARROW_K = 255
"""Up to this K a slot is a byte, and 255 stands for none."""
NARROW_NODES = 2**16
"""Below this many nodes, the pad included, an index is 16 bits wide."""
PACKED_K = 2**8
PACKED_NOUT = 2**24
"""Up to these, slot and output node fit into 32 bits, 8 for the slot."""
MAX_INT32 = 2**31 - 1

_INTEGER_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64}
)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
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
    """``[entries]``, by (input node, ``k * Nout + n``): int32 ``(k << 24) | n``, to be read as uint32, while K is at
    most 256 and Nout at most 2^24; otherwise int64 ``(k << 32) | n``."""
    device: torch.device
    first_slot: Tensor = field(init=False, repr=False)
    """``[Nout]``: the first non-pad slot; for an empty column none, 255 in uint8 (K up to 255), -1 in wider types."""
    gather_indices: Tensor = field(init=False, repr=False)
    """``indices`` as kernels read them: 16 bits wide (to be read as uint16) if Nin is below 2^16."""
    empty_columns: Tensor = field(init=False, repr=False)
    """int64: the output nodes whose slots are all pads."""
    rev_order: Tensor = field(init=False, repr=False)
    """int32 ``[nin]``: the input nodes, within each :data:`~knnpool_gen.kernel.CHUNK` those with the most readers
    first."""
    rev_head: Tensor = field(init=False, repr=False)
    """``[DEPTH, nin]``: the first entries of the nodes in this order; all ones where there are fewer."""

    @ordinary_tensors()
    def __post_init__(self) -> None:
        """Derive the tables that the constructor of the seed does not know."""
        dtype = aux_dtype(self.k)
        none = no_slot(self.k)
        slots = torch.arange(self.k, dtype=dtype, device=self.device)[:, None]
        real = self.indices < self.nin
        # The row of none makes the minimum exist where K = 0. Compared as if none were the largest number.
        far = torch.iinfo(dtype).max
        candidates = torch.cat([torch.where(real, slots, far), slots.new_full((1, self.nout), far)])
        first = candidates.amin(0)
        object.__setattr__(self, "first_slot", torch.where(real.any(0), first, none).to(dtype))
        narrow = self.indices.to(torch.int16) if reads_narrow(self.nin) else self.indices
        object.__setattr__(self, "gather_indices", narrow)
        object.__setattr__(self, "empty_columns", (~real.any(0)).nonzero().flatten())
        order = self._order()
        object.__setattr__(self, "rev_order", order.to(torch.int32))
        object.__setattr__(self, "rev_head", self._head(order))
        _by_own_table[id(self.indices)] = self
        capture.wait(self.device)

    def _order(self) -> Tensor:
        """The input nodes, chunk after chunk, those with the most readers first: short work fills the gaps."""
        readers = self.rev_rowptr.diff().to(torch.int64)
        chunk = torch.arange(self.nin, device=self.device) // CHUNK
        return (chunk * (self.k * self.nout + 1) - readers).argsort(stable=True)

    def _head(self, order: Tensor) -> Tensor:
        """The first entries of each node of ``order``."""
        start, end = (self.rev_rowptr[order + i].to(torch.int64) for i in (0, 1))
        entry = start + torch.arange(DEPTH, device=self.device)[:, None]
        some = torch.cat([self.rev_kn, self.rev_kn.new_zeros(1)])  # something to look at where there is nothing
        return some[entry.clamp(max=self.rev_kn.numel())].masked_fill(entry >= end, -1)

    def unpack(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and output nodes, both int64, of entries of the reverse table."""
        if entries.dtype is torch.int64:
            return entries >> 32, entries & 0xFFFFFFFF
        packed = entries.to(torch.int64) & 0xFFFFFFFF  # negative from slot 128 on
        return packed >> 24, packed & 0xFFFFFF

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take over copied or loaded tensors, wherever they have come to lie."""
        self.__dict__.update(state)
        self.__dict__["device"] = self.indices.device
        _by_own_table[id(self.indices)] = self
        capture.wait(self.device)

    @ordinary_tensors()
    def to(self, device: DeviceLike) -> PoolMeta:
        """This plan on ``device``: itself if it is there already, otherwise a copy."""
        if resolve_device(device) == self.device:
            return self
        moved = object.__new__(PoolMeta)
        moved.__setstate__({name: _moved(value, device) for name, value in vars(self).items()})
        return moved


_by_own_table: weakref.WeakValueDictionary[int, PoolMeta] = weakref.WeakValueDictionary()


def plan_of_own_table(indices: Tensor) -> PoolMeta | None:
    """The plan whose own table ``indices`` is, if it is any's."""
    plan = _by_own_table.get(id(indices))
    return plan if plan is not None and plan.indices is indices else None


def aux_dtype(k: int) -> torch.dtype:
    """The type of slots in ``aux``: uint8 up to K = 255, then int16, then int32."""
    if k <= NARROW_K:
        return torch.uint8
    return torch.int16 if k <= torch.iinfo(torch.int16).max else torch.int32


def no_slot(k: int) -> int:
    """What ``aux`` and ``first_slot`` hold where there is no slot."""
    return NARROW_K if k <= NARROW_K else -1


def reads_narrow(nin: int) -> bool:
    """Whether an index, that of the pad included, has 16 bits."""
    return nin < NARROW_NODES


def packs_narrow(k: int, nout: int) -> bool:
    """Whether an entry of the reverse table, slot and output node, has 32 bits."""
    return k <= PACKED_K and nout <= PACKED_NOUT


def _moved(value: object, device: DeviceLike) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


@capture.built_apart
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
    check_table(indices)
    check_has_values("indices", indices, "the plan of a table")
    nin = _checked_nin(nin)
    k, nout = indices.shape
    for name, size in (("K * Nout", k * nout), ("Nin", nin)):
        if size > MAX_INT32:
            raise InvalidArgumentError(f"{name} = {size} is not supported, at most {MAX_INT32}")
    device = indices.device if device is None else resolve_device(device)
    if device.type == "meta":
        raise InvalidArgumentError("device = 'meta': a plan consists of values, which nothing there has")

    table = indices.to(device, torch.int64)
    if indices.dtype is torch.uint64:
        table = torch.where(table < 0, nin, table)  # 2**63 and more have wrapped around: padding
    else:
        _check_not_negative(table, nin)
    table = table.clamp(max=nin).contiguous()  # always a copy, never the caller's own memory

    real = table < nin
    count = real.sum(0).to(torch.float32)
    slots = torch.arange(k, device=device)[:, None]
    wide = not packs_narrow(k, nout)
    packed = slots << (32 if wide else 24) | torch.arange(nout, device=device)
    nodes = table[real]  # both in order of k * Nout + n, which the stable sort keeps within a node
    entries = packed[real][nodes.argsort(stable=True)]
    ends = nodes.bincount(minlength=nin).cumsum(0)
    return PoolMeta(
        nin=nin,
        nout=nout,
        k=k,
        indices=table.to(torch.int32),
        indices_i64=table,
        count=count,
        inv_count=count.reciprocal(),
        rev_rowptr=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        rev_kn=entries if wide else entries.to(torch.int32),
        device=device,
    )


class PlanCache:
    """Plans of the tables used last; see :class:`TableCache`."""

    def __init__(self, limit: int = 64) -> None:
        """Start empty; ``limit`` is at least 1."""
        self._plans: TableCache[PoolMeta] = TableCache(limit)

    def __len__(self) -> int:
        """Return the number of plans kept."""
        return len(self._plans)

    def get(self, indices: Tensor, nin: SupportsIndex, device: DeviceLike | None = None) -> PoolMeta:
        """Return the plan of ``indices`` as it is now; arguments as for :func:`pool_meta_from_indices`."""
        if type(nin) is int and type(device) is torch.device:  # the usual case: nothing to check where there is a plan
            found = self._plans.look(indices, (nin, device))
            if found is not None:
                return found
        check_table(indices)
        nodes = _checked_nin(nin)
        where = indices.device if device is None else resolve_device(device)
        return self._plans.get(indices, (nodes, where), lambda: pool_meta_from_indices(indices, nodes, where))

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


_plans = PlanCache(limit=4096)  # more layers than a model has; a plan goes with its table anyway


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
    indices, nin = table_of(layer)
    device = indices.device if device is None else resolve_device(device)

    # The stamp is read before the plan and written after it, so that it never vouches for an older plan.
    stamp = getattr(layer, _LAYER_STAMP, None)
    plan = getattr(layer, _LAYER_PLAN, None)
    if (
        isinstance(stamp, TableStamp)
        and isinstance(plan, PoolMeta)
        and (plan.nin, plan.device) == (nin, device)
        and stamp.matches(indices)
    ):
        return plan
    stamp = TableStamp(indices)
    plan = pool_meta_from_indices(indices, nin, device)
    # Past nn.Module.__setattr__: nothing is to be registered.
    object.__setattr__(layer, _LAYER_PLAN, plan)
    object.__setattr__(layer, _LAYER_STAMP, stamp)
    return plan


def resolve_device(device: DeviceLike) -> torch.device:
    """Return what a tensor made on ``device`` says of itself: ``cuda:<current>`` for ``cuda``.

    Raises:
        InvalidArgumentError: no such device.
    """
    try:
        found = torch.device(device)
        if found.type == "cpu":
            return torch.device("cpu")
        return torch.empty(0, device=found).device if found.index is None else found
    except (RuntimeError, TypeError, AssertionError) as error:  # the last from a torch without CUDA
        raise InvalidArgumentError(f"device = {device!r}: {error}") from error


def table_of(layer: object) -> tuple[Tensor, int]:
    """Return the table and Nin of a layer like fovi's ``KNNPoolingLayer``, checked."""
    kind = type(layer).__name__
    indices = getattr(layer, "knn_indices_pad_token", None)
    if indices is None:
        raise UnsupportedTypeError(f"{kind} has no knn_indices_pad_token, the table of a pooling layer")
    check_table(indices)
    nin = getattr(layer, "knn_pad_token_val", None)
    if nin is None:
        coordinates = getattr(layer, "in_coords", None)
        if coordinates is None:
            raise UnsupportedTypeError(f"{kind} has neither knn_pad_token_val nor in_coords to say what Nin is")
        nin = coordinates.shape[0]
    return indices, _checked_nin(nin)


def check_has_values(name: str, tensor: Tensor, why: str) -> None:
    """Raise for a meta tensor; ``why`` says what depends on the values that it lacks."""
    if tensor.is_meta:
        raise InvalidArgumentError(f"{name} is a meta tensor: {why} depends on its values")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` lies in ordinary memory: neither sparse nor nested."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise UnsupportedTypeError(f"{name} must be a strided tensor, not {kind}")


def check_table(indices: object) -> None:
    """Check what a look at a table tells; its values are checked when a plan is built."""
    if not isinstance(indices, Tensor):
        raise UnsupportedTypeError(f"indices must be an integer tensor, not {type(indices).__name__}")
    if indices.dtype not in _INTEGER_DTYPES:
        raise UnsupportedTypeError(f"indices must be an integer tensor, not {indices.dtype}")
    check_dense("indices", indices)
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
