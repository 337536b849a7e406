"""Benches of the GPU path, on random weights made on the device.

    python -m benches.gpu golden check frame breakdown codec engine --out results.json

A figure counts only if `check` is green in the same run.
"""
