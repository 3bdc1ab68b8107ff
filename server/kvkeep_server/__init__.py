"""The daemon and its command. A request only ever goes down this list; `lint-imports` holds it.

__main__  the entry point: standard library only
cli       one module a command        daemon    builds, wires, starts and drains everything
config    one TOML file -> Settings   rpc       gRPC and the fd socket; proto <-> core values
                                    metrics   Prometheus: catalogue, readings, endpoint
service   sessions, namespaces, use cases       tiering   which tier answers, who stays, what moves
tiers     ram, nvme: one protocol     index     the shared table, to the byte
policies  who leaves, what enters     core      keys, results, errors, clock: values only
"""
