"""Engines that `bench.engine` compares, each behind the same lines of JSON.

Every module but `stdio`, `process`, `batches` and `conversion` is one engine's worker:
`python -m bench.peers.NAME --model FOLDER`, run by the Python of the environment that the engine
is installed in. Workers import nothing of Seedance, but for Seedance's own.
"""
