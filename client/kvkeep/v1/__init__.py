"""The contract: stubs generated from proto/kvkeep/v1 by `make stubs`, never edited."""
