"""The public suite of stores: what :class:`specflow.protocols.Store` promises, sentence by sentence.

Who writes a store runs it with pytest (hypothesis is needed too)::

    from specflow.stores.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        durable = True

        def make_store(self, tmp_path):
            return MyStore(tmp_path / "runs")

        def reopen(self, store):
            return MyStore(store.path)

Each test gets a fresh, empty store. ``durable`` and ``multi_process`` say what the store can do, and need ``reopen``;
``expire_leases`` lets the suite see what happens when time passes. A store that merely keeps more than it has to, such
as one whose ``collect`` drops nothing of a short history, passes; one that loses something does not.

For readable reports of failed assertions, put ``pytest.register_assert_rewrite("specflow.stores.conformance")`` into
``conftest.py``. This is the only module of the package that needs pytest and hypothesis.
"""

from __future__ import annotations

from .suite import StoreConformance

__all__ = ["StoreConformance"]
