"""The `kvkeep` command: one module a command; argument parsing and printing only."""
