"""One save, from the snapshot to the result.

The path of a byte, from its place in a file to the commit:

1. `saving/pipeline.py`: the course of a save, from top to bottom.
2. `saving/strategy.py`: planning, beginning and committing it (`saving/collective.py` with several ranks).
3. `planning/dcp_plan.py`: which item goes into which file.
4. `planning/layout.py`: where every byte of a file goes, and the sealing of chunks with framing and CRCs.
5. `saving/staging_session.py`: chunks of staging memory, and the stager of each device.
6. `staging/cpu.py`: the copy from a tensor into a chunk (`staging/cuda.py` for accelerators).
7. `writing/file_writer.py`: seal each chunk, and write the files in order.
8. `storage/local/transaction.py`: the temporary directory of a save.
9. `storage/local/sink.py`: one file: direct I/O, retries, fsync.
10. `writing/commit.py`: the metadata and the manifest, written last.
11. `storage/local/commit.py`: the rename to the final name, made durable.
"""
