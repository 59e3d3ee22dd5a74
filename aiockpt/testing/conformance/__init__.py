"""The tests that every storage has to pass, for pytest."""

from __future__ import annotations

from aiockpt.testing.conformance.directories import DirectoryTests
from aiockpt.testing.conformance.files import CommitTests, FileTests, StateTests
from aiockpt.testing.conformance.shared import SharedTests


class StorageConformance(FileTests, CommitTests, SharedTests, DirectoryTests, StateTests):
    """Tests of a storage: derive a class of tests from it, and make a storage.

    ::

        from aiockpt.testing import StorageConformance

        class TestMyStorage(StorageConformance):
            looks = leases = sets_aside = False      # no manager can use it

            def make_storage(self, tmp_path):
                return MyStorage(tmp_path)

    It needs pytest alone, no plugin: each test runs on one event loop of its own. Tests of what the `Traits` of the
    storage exclude are skipped, and so are those of the attributes that are False: the storage must refuse it then.

    Attributes:
        deletes: it has `Storage.delete`.
        leases: it has `Storage.lease` and ``owner_of``.
        looks: it has `Storage.look`.
        revokes: a transaction that was revoked before its `Transaction.commit` is not published.
        sets_aside: it has `Storage.set_aside`.
        shares: it is a `SharedStorage`.
    """
