"""Every error a user can meet. Each is also one of Python's own kinds, so ordinary code catches it.

::

    KNNPoolError
    ├── InvalidArgumentError (ValueError)    right type, unusable value
    │   ├── UnknownModeError                 no such mode
    │   └── OutOfReachError                  no kernel reaches a problem of this size
    ├── UnsupportedTypeError (TypeError)     a dtype or kind of object that is not supported
    ├── SpecError            (ValueError)    faults in specs/*.yaml, all of a run together
    ├── CaptureError         (RuntimeError)  a CUDA graph capture finds something not prepared
    └── KernelError          (RuntimeError)  a kernel cannot be built, loaded or trusted
        ├── MissingDependencyError (ImportError)  an extra is not installed
        ├── CompileError                     NVRTC refused a source
        └── StaleDispatchError               the dispatch table does not match its sources
"""

from __future__ import annotations


class KNNPoolError(Exception):
    """Base of all errors of this package."""


class InvalidArgumentError(KNNPoolError, ValueError):
    """An argument has the right type and an unusable value; the message names both."""


class UnknownModeError(InvalidArgumentError):
    """No such mode; the message lists those that exist."""


class OutOfReachError(InvalidArgumentError):
    """No kernel reaches a problem of this size on this device."""


class UnsupportedTypeError(KNNPoolError, TypeError):
    """A dtype or a kind of object that is not supported; the message lists what is."""


class SpecError(KNNPoolError, ValueError):
    """Faults in the specs, each with ``file:line``; nothing was written."""


class CaptureError(KNNPoolError, RuntimeError):
    """Something had to be prepared before a CUDA graph capture; the message says how. The capture is unharmed."""


class KernelError(KNNPoolError, RuntimeError):
    """A kernel cannot be built, loaded or trusted."""


class MissingDependencyError(KernelError, ImportError):
    """An optional part is not installed; the message names the extra that brings it."""


class CompileError(KernelError):
    """NVRTC refused a source; the message is its log with file name and line."""


class StaleDispatchError(KernelError):
    """The dispatch table and its sources do not belong together; regenerate."""
