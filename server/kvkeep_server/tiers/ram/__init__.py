"""The ram tier: sealed chunks (`pool`), slots in them (`slabs`), and both as a `tier`."""
