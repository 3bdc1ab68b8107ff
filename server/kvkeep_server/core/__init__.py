"""Values and enums that every layer shares: keys, results, errors, hints, clock."""
