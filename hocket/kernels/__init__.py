"""Triton kernels, each beside a torch function of the same arguments and meaning.

The torch function, `name_torch`, is the specification and carries the docstring; `name_triton` launches
the kernel; `name` takes one of the two, as `hocket.kernels.choice` says.
"""
