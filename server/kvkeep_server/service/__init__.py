"""Use cases and who may call them: namespaces, sessions, block service."""
