"""The nvme tier: an append-only log of segments in several directories.

`segment_format` says how a file looks, `files` is the only module that makes system calls,
`segments` knows the files of one directory and their lives, `appender` writes (group commit),
`reading` reads and verifies, `recovery` finds again what was written, `reclaim` gives room back,
`tier` puts them together behind `tiers.base.Tier`.
"""
