"""Which blocks are where, and what moves them: residency, manager, demotion, promotion,
recovery, leases, ghosts."""
