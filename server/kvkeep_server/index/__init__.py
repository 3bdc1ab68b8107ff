"""The shared index: where each block is. Layout in `layout`, the daemon's (writing) half in
`table`."""
