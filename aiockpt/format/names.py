"""File names of the checkpoint formats."""

DCP_MODULE = "torch.distributed.checkpoint.metadata"  # where torch defines the classes in `.metadata`
DCP_VERSION = "1.0.0"  # the version of DCP's format
METADATA_NAME = ".metadata"  # the index of DCP's format; the last file to be written
MANIFEST_NAME = ".aiockpt.json"  # the manifest: everything that DCP's index has no room for
SUFFIX = ".safetensors"  # of safetensors files
SHARDING_KEY = "DCP_SHARDING_INFO"  # of their metadata: where HuggingFaceStorageWriter says that each tensor begins
INDEX_NAME = "model.safetensors.index.json"  # of a set of safetensors files
HIDDEN = ".aiockpt-"  # prefix of temporary directories and their sidecar files; see `aiockpt.storage.local.temp_dir`
# A single-file checkpoint in its temporary directory; without its name and suffix it is not mistaken for complete.
SINGLE_NAME = "single"
COMMON_NAME = "common.pt"  # what Megatron-Core stores beside `.metadata`: the rest of the state
OPEN_MARK = ".aiockpt-open"  # in a temporary directory that others write into, too: all in it is removed with it
CONFIG_NAME = "metadata.json"  # in which Megatron-Core says so
