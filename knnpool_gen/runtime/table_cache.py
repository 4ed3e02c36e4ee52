"""What is derived from a user's tensor, kept as long as the tensor is alive and unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime import capture

T = TypeVar("T")


class TableCache(Generic[T]):
    """Values derived from tables, found by the identity of the table and a key. Safe to use from several threads.

    A value is dropped when its table dies, is built again when the table was changed in place or given other data,
    and keeps no table alive. At most ``limit`` values are kept, the least recently used one goes first.
    """

    def __init__(self, limit: int = 64) -> None:
        """Start empty; ``limit`` is at least 1."""
        if limit < 1:
            raise InvalidArgumentError(f"limit = {limit}: a cache holds at least 1 entry")
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, Hashable], tuple[TableStamp, T]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of values kept."""
        return len(self._kept)

    def look(self, table: Tensor, key: Hashable) -> T | None:
        """Return the value of ``table`` as it is now under ``key`` if it is there: the usual case, without a lock."""
        full_key = (id(table), key)
        found = self._kept.get(full_key)
        if found is None or not found[0].matches(table):
            return None
        with suppress(KeyError):  # another thread may have dropped it meanwhile
            self._kept.move_to_end(full_key)
        return found[1]

    def get(self, table: Tensor, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of ``table`` as it is now under ``key``; ``build`` makes it where there is none."""
        value = self.look(table, key)
        if value is not None:
            return value
        full_key = (id(table), key)
        kept = self._kept
        with self._lock:
            found = kept.pop(full_key, None)
            if found is None or not found[0].matches(table):
                # A dying table takes its value along. No lock there, since the collector may run it while this
                # thread holds the lock; one pop is atomic, and no id is given out again before it has run.
                found = (TableStamp(table, lambda _: kept.pop(full_key, None)), build())
            kept[full_key] = found
            while len(kept) > self._limit:
                kept.popitem(last=False)
        return found[1]

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._kept.clear()


_seen: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()


def same_table(table: Tensor) -> Tensor:
    """The first tensor seen here that is ``table`` itself or a detached alias of it, sharing memory and version.

    A compiled backward gets a table that is a view as a new alias on every call, for which nothing would be found.
    """
    if table.is_inference():
        return table
    place = (table.untyped_storage()._cdata, table.data_ptr(), table.shape, table.stride(), table.dtype)
    seen = _seen.setdefault(place, table)
    if seen.data_ptr() != table.data_ptr() or seen._version != table._version:
        seen = _seen[place] = table
    return seen


class TableStamp:
    """Recognises a table in the state it has now, without keeping the table alive."""

    def __init__(self, table: Tensor, on_death: Callable[[object], object] | None = None) -> None:
        """Take the stamp of ``table``; ``on_death`` is called when the table dies before the stamp does."""
        self._table = weakref.ref(table, on_death)
        self._facts = _facts(table)
        # While it is held, its address cannot come back as that of other data.
        self._storage = table.untyped_storage()
        # Inference tensors do not count their changes: only the contents can tell.
        self._contents = _contents(table) if table.is_inference() else None

    def matches(self, table: Tensor) -> bool:
        """Whether ``table`` is the same object, unchanged as far as torch records changes."""
        if self._table() is not table or self._facts != _facts(table):
            return False
        if self._contents is None:
            return True
        if table.is_cuda:
            capture.refuse("a table made in inference mode is compared at every call")
        return torch.equal(_contents(table), self._contents)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: what is copied or loaded with it has another table."""
        return type(None), ()


def _facts(table: Tensor) -> tuple[object, ...]:
    version = None if table.is_inference() else table._version
    return version, table.data_ptr(), table.shape, table.stride(), table.dtype, table.device


def _contents(table: Tensor) -> Tensor:
    """A copy that can be compared: not all integer types can, and NaN is not equal to itself."""
    if table.is_floating_point():
        return table.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return table.to(torch.int64, copy=True)
