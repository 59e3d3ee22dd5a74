"""Opening, loading, streaming and verifying checkpoints.

How a load works, in the order of the code:

1. `load`: a load from top to bottom, `CheckpointLoad` for whole states and `read_requests` for readers. Everything
   that can be refused is refused before the first byte reaches a target.
2. `open`: finds the format, reads and checks the index: for each key a dtype, a shape and byte ranges of files.
3. `target_plan`: matches a caller's state dict and live objects with the index, checked by `targets`. Pure.
4. `read_plan`: turns entries, parts of tensors and targets into reads, one for each stored chunk. Pure.
5. `executor`: groups reads into jobs, and runs these with the engine's threads.
6. `jobs`: one thread's work. Small neighbours are read with one system call, large chunks in parts, straight into their
   target or through a buffer. The CRC is computed in the same pass.
7. `decoded`: the source that all jobs read from, in which transformed items look like plain files.
8. `load` again: makes tensors of the memory, a state dict of the values, and puts new values into the target.

Around it: `apply_live` ends a load in the caller's thread (`load_state_dict`, warnings), `collective` lets all ranks
succeed or fail together, `reader` and `info` are the public view of an open checkpoint, `verify` checks every byte.
"""
