"""Sound in and out of the engine: decode and check references, resample, encode answers.

Knows bytes and NumPy arrays only; models, requests and HTTP are for the layers above.
"""
