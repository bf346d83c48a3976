"""The only place that joins sources, cache, engine and sinks. Callable from Python.

The way of a byte from `mx pull` to its place; each line calls the next one:

    pull.Pull                        routes in order: peer, cache, origin, stream
    peering.Peering                  who has it: found, compared, granted, and a path to each (data_path)
    pull_files                       `--to DIR`: whole_files into a new_directory, which then appears
    peer_supply, prefetch            the cache: peers supply what the origin would
    pull_routes.TensorPull           memory, by the same routes
        pull_tensors.IntoMemory      whole tensors, to where targets says; pull_memory.move
        pull_ranks.RankPull          one rank's shares, from share_peers; ranks.bring
    engine.run.Transfer              items from a source to a sink, verified, retried
"""
