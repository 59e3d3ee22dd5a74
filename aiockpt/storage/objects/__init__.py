"""Checkpoints in object stores: flat keys, whole objects, conditional puts; no rename, and no directories.

===================================  =============================================================================
object                               contents
===================================  =============================================================================
``{path}/.metadata``                 makes the checkpoint: DCP's metadata, then the other documents and the facts of
                                     `commit.Commit`; stock's reader stops before these
``{path}/{token}/files/{name}``      a file
``{path}/{token}/state``             "open" at first; see `cleaning.decide`
``{path}/{token}/held/{ticket}``     a process that takes part, besides the one of the token
``{run}/.aiockpt.lease``             the manager that writes to a run
===================================  =============================================================================

A token is the ticket of a transaction, without the dot at its beginning. To publish, or to discard, a process replaces
the state that `begin` has written, if it still has that stamp: one succeeds. Then one conditional put of ``.metadata``
publishes. What it has replaced, and what is deleted, stays for ``grace_s`` seconds for those that read it; then they
get a CheckpointNotFoundError.

A checkpoint of one file is the object ``{path}`` itself, which appears as a whole when its upload ends. There is no
condition for that, so its writer first puts a tombstone at ``{path}/.metadata``: nobody else can publish there. Then
it looks at what is there. What it has below its token goes afterwards.

Every object that a condition protects has contents of its own, since an ETag may be a hash of them. So an answer that
was lost is no problem: whoever reads its own contents has written them.
"""
