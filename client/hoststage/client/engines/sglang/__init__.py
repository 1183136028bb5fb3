"""hoststage as the host tier of SGLang, turned on by flags: see `docs/sglang.md`.

`backend.HostStageStorage` is a storage backend for `--hicache-storage-backend dynamic`; `allocator` puts SGLang's host pools into the daemon's memory;
`linker` does without host pools. The plug-in and the settings can be imported without sglang.
"""
