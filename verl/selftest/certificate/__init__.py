"""The certificate of a model: trainer, rollout engine and plain Transformers compute the same numbers with it.

On the command line it is ``verl selftest --model DIR``.
"""

from __future__ import annotations

from verl.selftest.certificate.report import Certificate
from verl.selftest.certificate.suite import CHECKS, certify

__all__ = ["CHECKS", "Certificate", "certify"]
