"""Kernels against the reference: what ``knnpool-gen verify`` and the tests run."""

from knnpool_gen.verification.backends import Backend, DeviceBackend, choose_backend
from knnpool_gen.verification.calls import Call, calls
from knnpool_gen.verification.compare import difference
from knnpool_gen.verification.verdict import Verdict, verify_kernel

__all__ = [
    "Backend",
    "Call",
    "DeviceBackend",
    "Verdict",
    "calls",
    "choose_backend",
    "difference",
    "verify_kernel",
]
