"""Counts the bytes of the tensors that are alive on a CPU, and their peak."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that an operation returns, inside its context, except those of ``known`` tensors.

    Triton's interpreter leaves tensors in circles of references. With ``collects``, garbage is collected before each
    new storage, which is slow in a first pass, because that imports many modules.
    """

    def __init__(self, known: Iterable[torch.Tensor], collects: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collects = collects
        self.peak = 0
        self._live = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.freeze()  # so that collecting is fast
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        gc.unfreeze()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        out = function(*arguments, **(options or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        if self.collects:
            gc.collect()
        self._live[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self._live.values()))
        weakref.finalize(storage, self._live.pop, key)
