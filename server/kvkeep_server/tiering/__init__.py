"""Which blocks are where, and what moves them: residency, manager, transfers, leases, ghosts."""
