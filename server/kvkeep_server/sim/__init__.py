"""Recorded request streams: `kvkeep demo` replays one today, the simulator will."""
