"""Tables of what there is, a row each. A row carries every fact that the rest asks for.

Rows are read before JAX is imported (options, help and completion show them): what computes imports it when called.
"""
