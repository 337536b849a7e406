"""The load generator: an HTTP client that plays many listeners and says what they heard.

It knows the API and nothing of the server behind it, so that any server with `/v1/audio/speech` can be
measured. `hocket.cli.bench` is its command line; docs/bench.md defines every figure.
"""
