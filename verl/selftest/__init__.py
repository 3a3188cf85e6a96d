"""The self-test: every registered estimator and loss gives the same numbers however the work is cut.

On the command line it is ``verl selftest``. For plug-ins: :func:`register_field` says how to make a batch field that
only the plug-in knows, :func:`estimator_laws` and :func:`loss_laws` claim laws to be held to.
"""

from __future__ import annotations

from verl.selftest.batches import register_field
from verl.selftest.invariances import estimator_laws, loss_laws
from verl.selftest.suite import run_selftest

__all__ = ["estimator_laws", "loss_laws", "register_field", "run_selftest"]
